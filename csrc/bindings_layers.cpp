// All layers of a decode step in one call, see step_layers.h. saccade/ops/layer_rows.py and cpu_plans.py keep the tensors
// alive.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "step_layers.h"
#include "step_ops.h"

namespace nb = nanobind;

namespace saccade {
namespace {

std::pair<double, double> run_step_layers(const KernelSet& set, DecodeStep& step, const DecoderLayers& model,
                                          const Pool& pool, const LayersCall& call,
                                          const std::vector<LayerTurn>& turns, bool watched) {
    nb::gil_scoped_release release;
    return run_layers(set, model, step, pool, call, turns, watched);
}

std::pair<double, double> run_step_ops(const KernelSet& set, DecodeStep& step, StepOps& ops, const Pool& pool,
                                       int attending, bool watched) {
    nb::gil_scoped_release release;
    return ops.run(set, step, pool, attending, watched);
}

void run_calls(const KernelSet& set, const StepOps& ops) {
    nb::gil_scoped_release release;
    ops.run(set);
}

void bind_ops(nb::module_& m, KernelSetClass& set) {
    bind_struct<MixCall>(
        m, "MixCall",
        {field<&MixCall::kind>("kind").within(0, 4), field<&MixCall::threads>("threads").at_least(1),
         field<&MixCall::storage>("storage").within(0, 1), field<&MixCall::rows>("rows"),
         field<&MixCall::width>("width").at_least(1), field<&MixCall::x>("x"), field<&MixCall::x_stride>("x_stride"),
         field<&MixCall::y>("y").optional(), field<&MixCall::y_stride>("y_stride").optional(),
         field<&MixCall::log>("log").optional(), field<&MixCall::bias>("bias").optional(),
         field<&MixCall::out>("out"), field<&MixCall::out_stride>("out_stride")},
        [](const MixCall& c) {
            const bool pairs = c.kind != Mixing::rates && c.kind != Mixing::decays;
            if (pairs != (c.y != nullptr) || (c.kind == Mixing::decays) != (c.log && c.bias))
                throw std::invalid_argument("a mixing has what it takes, and nothing else");
        });
    bind_struct<AttendCall>(
        m, "AttendCall",
        {field<&AttendCall::layer>("layer"), field<&AttendCall::rows>("rows").at_least(1),
         field<&AttendCall::heads>("heads").at_least(1), field<&AttendCall::kv_heads>("kv_heads").at_least(1),
         field<&AttendCall::head_dim>("head_dim").at_least(1), field<&AttendCall::q>("q"), field<&AttendCall::k>("k"),
         field<&AttendCall::v>("v"), field<&AttendCall::out>("out"), field<&AttendCall::lse>("lse"),
         field<&AttendCall::scale>("scale"), field<&AttendCall::softcap>("softcap").optional()});
    nb::class_<StepOps>(m, "StepOps")
        .def(nb::init<>())
        .def("__len__", &StepOps::size)
        .def("add", &StepOps::add<ProductRows>)
        .def("add", &StepOps::add<NormRows>)
        .def("add", &StepOps::add<PassCall>)
        .def("add", &StepOps::add<CausalConv>)
        .def("add", &StepOps::add<DeltaRule>)
        .def("add", &StepOps::add<MixCall>)
        .def("add", &StepOps::add<AttendCall>);
    set.def("run_ops", &run_step_ops);
    set.def("run_calls", &run_calls);
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
    bind_ops(m, set);
}

}  // namespace saccade
