// All layers of a decode step in one call, see step_layers.h. saccade/ops/layer_rows.py and cpu_plans.py keep the tensors
// alive.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "step_layers.h"

namespace nb = nanobind;

namespace saccade {
namespace {

std::pair<double, double> run_step_layers(const KernelSet& set, DecodeStep& step, const DecoderLayers& model,
                                          const Pool& pool, const LayersCall& call,
                                          const std::vector<LayerTurn>& turns, bool watched) {
    nb::gil_scoped_release release;
    return run_layers(set, model, step, pool, call, turns, watched);
}

}  // namespace

void bind_layers(nb::module_& m, KernelSetClass& set) {
    nb::class_<DecoderLayers>(m, "DecoderLayers").def(nb::init<std::vector<LayerWeights>>());
    bind_struct<LayerTurn>(
        m, "LayerTurn",
        {field<&LayerTurn::cos>("cos").optional(), field<&LayerTurn::sin>("sin").optional(),
         field<&LayerTurn::scale>("scale"), field<&LayerTurn::softcap>("softcap").optional(),
         field<&LayerTurn::turned>("turned").optional(), field<&LayerTurn::query_balance>("query_balance").optional(),
         field<&LayerTurn::key_balance>("key_balance").optional()},
        [](const LayerTurn& turn) {
            if (!turn.cos != !turn.sin) throw std::invalid_argument("cos and sin go together");
        });
    bind_struct<LayersCall>(
        m, "LayersCall",
        {field<&LayersCall::rows>("rows").at_least(1), field<&LayersCall::hidden>("hidden"),
         field<&LayersCall::q>("q"), field<&LayersCall::k>("k"), field<&LayersCall::v>("v"),
         field<&LayersCall::attended>("attended"), field<&LayersCall::lse>("lse"),
         field<&LayersCall::threads>("threads").at_least(1), field<&LayersCall::attending>("attending").at_least(1)});
    set.def("run_layers", &run_step_layers);
}

}  // namespace saccade
