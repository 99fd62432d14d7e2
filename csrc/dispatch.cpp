// Which kernel sets this CPU (and its operating system: the builtins check saved register state too) can run.
#include "kernels.h"

namespace saccade {

const KernelSet* const* supported_kernels(int* count) {
    static const KernelSet* sets[3];
    static const int found = [] {
        int n = 0;
#if defined(SACCADE_HAS_AVX512_BF16)
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq"))
            sets[n++] = &avx512_bf16_kernels;
#endif
#if defined(SACCADE_HAS_AVX2)
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) sets[n++] = &avx2_kernels;
#endif
        sets[n++] = &portable_kernels;
        return n;
    }();
    *count = found;
    return sets;
}

}  // namespace saccade
