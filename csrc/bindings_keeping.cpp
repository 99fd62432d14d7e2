// Layers that keep a state: the Python side (saccade/ops/cpu_keeping.py) checks shapes and dtypes and keeps the tensors
// alive.
#include "bindings_keeping.h"

#include "keeping_kernels.h"

namespace nb = nanobind;

namespace saccade {
namespace {

void check_slots(const StateSlots& states, int64_t sequences) {
    for (int64_t s = 0; s < sequences; ++s)
        if (states.slots[s] < 0 || states.slots[s] >= states.count)
            throw std::invalid_argument("slot " + std::to_string(states.slots[s]) + " is none of the " +
                                        std::to_string(states.count) + " of the pool");
}

void check_shares(int64_t heads, int64_t parts, const char* what) {
    if (heads % parts)
        throw std::invalid_argument(std::to_string(heads) + " heads cannot share " + std::to_string(parts) + " " +
                                    what + " alike");
}

void delta_rule(const KernelSet& set, const DeltaRule& call) { run(set.keeping->delta_rule, call); }
void causal_conv(const KernelSet& set, const CausalConv& call) { run(set.keeping->causal_conv, call); }
void state_space(const KernelSet& set, const StateSpace& call) { run(set.keeping->state_space, call); }
void norm_rows(const KernelSet& set, const NormRows& call) { run(set.keeping->norm_rows, call); }

}  // namespace

void bind_keeping(nb::module_& m, KernelSetClass& set) {
    bind_struct<TokenRows>(m, "TokenRows",
                           {field<&TokenRows::at>("at"), field<&TokenRows::sequence>("sequence"),
                            field<&TokenRows::token>("token")});
    bind_struct<StateSlots>(m, "StateSlots",
                            {field<&StateSlots::pool>("pool"), field<&StateSlots::count>("count"),
                             field<&StateSlots::stride>("stride"), field<&StateSlots::slots>("slots")});
    bind_struct<DeltaRule>(
        m, "DeltaRule",
        {field<&DeltaRule::threads>("threads").at_least(1), field<&DeltaRule::storage>("storage").within(0, 1),
         field<&DeltaRule::normalize>("normalize"), field<&DeltaRule::sequences>("sequences"),
         field<&DeltaRule::tokens>("tokens"), field<&DeltaRule::key_heads>("key_heads").at_least(1),
         field<&DeltaRule::value_heads>("value_heads").at_least(1), field<&DeltaRule::d_k>("d_k").at_least(1),
         field<&DeltaRule::d_v>("d_v").at_least(1), field<&DeltaRule::q>("q"), field<&DeltaRule::k>("k"),
         field<&DeltaRule::v>("v"), field<&DeltaRule::g>("g"), field<&DeltaRule::beta>("beta"),
         field<&DeltaRule::states>("states"), field<&DeltaRule::out>("out")},
        [](const DeltaRule& c) {
            check_shares(c.value_heads, c.key_heads, "key heads");
            check_slots(c.states, c.sequences);
        });
    bind_struct<CausalConv>(
        m, "CausalConv",
        {field<&CausalConv::threads>("threads").at_least(1), field<&CausalConv::storage>("storage").within(0, 1),
         field<&CausalConv::silu>("silu"), field<&CausalConv::sequences>("sequences"),
         field<&CausalConv::tokens>("tokens"), field<&CausalConv::channels>("channels").at_least(1),
         field<&CausalConv::taps>("taps").at_least(1), field<&CausalConv::kept>("kept"), field<&CausalConv::x>("x"),
         field<&CausalConv::weight>("weight"), field<&CausalConv::bias>("bias").or_null(),
         field<&CausalConv::states>("states"), field<&CausalConv::out>("out")},
        [](const CausalConv& c) {
            if (c.taps > c.kept + 1)
                throw std::invalid_argument(std::to_string(c.taps) + " taps reach behind the " +
                                            std::to_string(c.kept) + " values that a state keeps");
            check_slots(c.states, c.sequences);
        });
    bind_struct<StateSpace>(
        m, "StateSpace",
        {field<&StateSpace::threads>("threads").at_least(1), field<&StateSpace::storage>("storage").within(0, 1),
         field<&StateSpace::softplus>("softplus"), field<&StateSpace::low>("low"), field<&StateSpace::high>("high"),
         field<&StateSpace::sequences>("sequences"), field<&StateSpace::tokens>("tokens"),
         field<&StateSpace::heads>("heads").at_least(1), field<&StateSpace::head_dim>("head_dim").at_least(1),
         field<&StateSpace::groups>("groups").at_least(1), field<&StateSpace::size>("size").at_least(1),
         field<&StateSpace::x>("x"), field<&StateSpace::b>("b"), field<&StateSpace::c>("c"),
         field<&StateSpace::dt>("dt"), field<&StateSpace::a>("a"), field<&StateSpace::d>("d").or_null(),
         field<&StateSpace::dt_bias>("dt_bias").or_null(), field<&StateSpace::states>("states"),
         field<&StateSpace::out>("out")},
        [](const StateSpace& c) {
            check_shares(c.heads, c.groups, "groups");
            check_slots(c.states, c.sequences);
        });
    bind_struct<NormRows>(
        m, "NormRows",
        {field<&NormRows::threads>("threads").at_least(1), field<&NormRows::storage>("storage").within(0, 1),
         field<&NormRows::weights>("weights").within(0, 2), field<&NormRows::gates_first>("gates_first"),
         field<&NormRows::rows>("rows"), field<&NormRows::channels>("channels").at_least(1),
         field<&NormRows::groups>("groups").at_least(1), field<&NormRows::x>("x"),
         field<&NormRows::x_stride>("x_stride"), field<&NormRows::gate>("gate").or_null(),
         field<&NormRows::gate_stride>("gate_stride"), field<&NormRows::weight>("weight"),
         field<&NormRows::epsilon>("epsilon"), field<&NormRows::out>("out")},
        [](const NormRows& c) {
            if (c.channels % c.groups)
                throw std::invalid_argument(std::to_string(c.channels) + " channels are no " +
                                            std::to_string(c.groups) + " groups of one size");
        });
    set.def("norm_rows", &norm_rows);
    set.def("delta_rule", &delta_rule);
    set.def("causal_conv", &causal_conv);
    set.def("state_space", &state_space);
}

}  // namespace saccade
