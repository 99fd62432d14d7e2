// Which kernel sets this CPU (and its operating system: the builtins check saved register state too) can run.
#include "kernels.h"

#if defined(SACCADE_HAS_AMX_BF16)
#include <cpuid.h>
#endif

namespace saccade {
#if defined(SACCADE_HAS_AMX_BF16)
namespace {

// AMX-TILE and AMX-BF16; not every compiler's builtin knows their names.
bool has_tiles() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 22 & 1);
}

}  // namespace
#endif

const KernelSet* const* supported_kernels(int* count) {
    static const KernelSet* sets[4];
    static const int found = [] {
        int n = 0;
#if defined(SACCADE_HAS_AVX512_BF16)
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
#if defined(SACCADE_HAS_AMX_BF16)
            if (has_tiles() && ask_for_tiles()) sets[n++] = &amx_bf16_kernels();
#endif
            sets[n++] = &avx512_bf16_kernels;
        }
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
