// Layers that keep a state: the Python side checks shapes and dtypes and keeps the tensors alive.
#include "bindings_keeping.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace saccade {
namespace {

void delta_rule(const KernelSet& set, int threads, uintptr_t q, uintptr_t k, uintptr_t v, uintptr_t g, uintptr_t beta,
                uintptr_t state, uintptr_t out, int64_t sequences, int64_t tokens, int64_t key_heads,
                int64_t value_heads, int64_t d_k, int64_t d_v, bool normalize) {
    if (threads < 1) throw std::invalid_argument("threads=" + std::to_string(threads) + " must be at least 1");
    if (key_heads < 1 || value_heads % key_heads)
        throw std::invalid_argument(std::to_string(value_heads) + " value heads cannot share " +
                                    std::to_string(key_heads) + " key heads alike");
    const auto at = [](uintptr_t address) { return reinterpret_cast<float*>(address); };
    run(set.keeping->delta_rule,
        DeltaRule{at(q), at(k), at(v), at(g), at(beta), at(state), at(out), sequences, tokens, key_heads, value_heads,
                  d_k, d_v, threads, normalize});
}

}  // namespace

void bind_keeping(nb::module_&, KernelSetClass& set) {
    set.def("delta_rule", &delta_rule, nb::kw_only(), "threads"_a, "q"_a, "k"_a, "v"_a, "g"_a, "beta"_a, "state"_a,
            "out"_a, "sequences"_a, "tokens"_a, "key_heads"_a, "value_heads"_a, "d_k"_a, "d_v"_a, "normalize"_a);
}

}  // namespace saccade
