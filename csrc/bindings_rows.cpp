// Layers on a few rows, and what they do between matrix products: saccade/ops/layer_rows.py and row_passes.py keep the
// tensors alive. What stays the same from call to call is handed over once, as a layer's weights.
#include "layer_calls.h"

namespace nb = nanobind;

namespace saccade {
namespace {

void project_rows(const KernelSet& set, int threads, const LayerWeights& w, const LayerInput& in) {
    run(set.project_rows, project_call(threads, w, in));
}

void finish_rows(const KernelSet& set, int threads, const LayerWeights& w, const LayerUpdate& in) {
    run(set.finish_rows, finish_call(threads, w, in));
}

void head_rows(const KernelSet& set, const HeadRows& call) { run(set.head_rows, call); }
void row_pass(const KernelSet& set, const PassCall& call) { run(set.row_pass, call); }

}  // namespace

void bind_rows(nb::module_& m, KernelSetClass& set) {
    bind_struct<RowMatrix>(m, "RowMatrix",
                           {field<&RowMatrix::weight>("weight"), field<&RowMatrix::bias>("bias").or_null(),
                            field<&RowMatrix::rows>("rows").at_least(1),
                            field<&RowMatrix::format>("format")
                                .within(0, static_cast<int>(WeightFormat::count) - 1)
                                .optional()});
    bind_struct<LayerWeights>(
        m, "LayerWeights",
        {field<&LayerWeights::storage>("storage").within(0, 1), field<&LayerWeights::channels>("channels").at_least(1),
         field<&LayerWeights::head_dim>("head_dim").at_least(1), field<&LayerWeights::norm>("norm"),
         field<&LayerWeights::epsilon>("epsilon"), field<&LayerWeights::query_norm>("query_norm").optional(),
         field<&LayerWeights::key_norm>("key_norm").optional(),
         field<&LayerWeights::head_epsilon>("head_epsilon").optional(),
         field<&LayerWeights::second_norm>("second_norm"), field<&LayerWeights::second_epsilon>("second_epsilon"),
         field<&LayerWeights::query>("query"), field<&LayerWeights::key>("key"),
         field<&LayerWeights::value>("value"), field<&LayerWeights::output>("output"),
         field<&LayerWeights::gate>("gate"), field<&LayerWeights::up>("up"), field<&LayerWeights::down>("down")});
    bind_struct<LayerInput>(
        m, "LayerInput",
        {field<&LayerInput::rows>("rows"), field<&LayerInput::hidden>("hidden").or_null(),
         field<&LayerInput::cos>("cos").optional(), field<&LayerInput::sin>("sin").optional(),
         field<&LayerInput::q>("q").or_null(), field<&LayerInput::k>("k").or_null(),
         field<&LayerInput::v>("v").or_null()},
        [](const LayerInput& in) {
            if (in.rows && !(in.hidden && in.q && in.k && in.v))
                throw std::invalid_argument("hidden, q, k and v must be addresses");
            if (!in.cos != !in.sin) throw std::invalid_argument("cos and sin go together");
        });
    bind_struct<LayerUpdate>(
        m, "LayerUpdate",
        {field<&LayerUpdate::rows>("rows"), field<&LayerUpdate::hidden>("hidden").or_null(),
         field<&LayerUpdate::attended>("attended").or_null()},
        [](const LayerUpdate& in) {
            if (in.rows && !(in.hidden && in.attended))
                throw std::invalid_argument("hidden and attended must be addresses");
        });
    bind_struct<HeadRows>(
        m, "HeadRows",
        {field<&HeadRows::threads>("threads").at_least(1), field<&HeadRows::storage>("storage").within(0, 1),
         field<&HeadRows::rows>("rows"), field<&HeadRows::channels>("channels").at_least(1),
         field<&HeadRows::hidden>("hidden").or_null(), field<&HeadRows::norm>("norm"),
         field<&HeadRows::epsilon>("epsilon"), field<&HeadRows::head>("matrix"),
         field<&HeadRows::out>("out").or_null()},
        [](const HeadRows& call) {
            if (call.rows && !(call.hidden && call.out))
                throw std::invalid_argument("hidden and out must be addresses");
        });
    bind_struct<PassCall>(
        m, "RowPass",
        {field<&PassCall::op>("kind").within(0, 3), field<&PassCall::threads>("threads").at_least(1),
         field<&PassCall::storage>("storage").within(0, 1), field<&PassCall::rows>("rows"),
         field<&PassCall::width>("width"), field<&PassCall::heads>("heads").at_least(1),
         field<&PassCall::x>("x").or_null(),
         field<&PassCall::x_stride>("row_stride"), field<&PassCall::head_stride>("head_stride").optional(),
         field<&PassCall::other>("other").optional(), field<&PassCall::other_stride>("other_stride").optional(),
         field<&PassCall::weight>("weight").optional(), field<&PassCall::out>("out").or_null(),
         field<&PassCall::eps>("eps").optional()},
        [](const PassCall& c) {
            if (!c.rows) return;  // what has no rows lies nowhere
            if (c.op == RowPass::turn) {
                if (!c.x || c.width < 16 || c.width % 16 || c.width > kMostTurned)
                    throw std::invalid_argument("heads that are turned have 16 to 1024 channels, a multiple of 16");
                return;
            }
            if (!c.x || !c.out || (c.op != RowPass::silu_mul && !c.weight) || (c.op != RowPass::rms_norm && !c.other))
                throw std::invalid_argument("x, out, and weight or other of this kind, must be addresses");
        });
    set.def("project_rows", &project_rows);
    set.def("finish_rows", &finish_rows);
    set.def("head_rows", &head_rows);
    set.def("row_pass", &row_pass);
}

}  // namespace saccade
