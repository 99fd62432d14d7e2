// Which kernel sets this CPU (and its operating system: the builtins check saved register state too) can run.
#include "kernels.h"

#include <atomic>

#if defined(SACCADE_HAS_AVX2)
#include <cpuid.h>
#endif
#if defined(SACCADE_HAS_NEON_BF16) && defined(__linux__)
#include <sys/auxv.h>
#elif defined(SACCADE_HAS_NEON_BF16) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace saccade {
#if defined(SACCADE_HAS_AVX2)
namespace {

// F16C; not every compiler's builtin knows its name.
bool has_half_conversion() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c >> 29 & 1);
}

std::atomic<bool> wants_avx_vnni{true};

bool uses_avx_vnni() {
#if defined(SACCADE_HAS_AVX_VNNI)
    static const bool has = [] {
        unsigned a, b, c, d;
        return __get_cpuid_count(7, 1, &a, &b, &c, &d) && (a >> 4 & 1);
    }();
    return has && wants_avx_vnni.load(std::memory_order_relaxed);
#else
    return false;
#endif
}

}  // namespace

const PlaneKernels& planes_of_avx2() {
#if defined(SACCADE_HAS_AVX_VNNI)
    if (uses_avx_vnni()) return avx_vnni_planes;
#endif
    return avx2_planes;
}

bool use_avx_vnni(bool wanted) {
    wants_avx_vnni = wanted;
    return uses_avx_vnni();
}
#else
bool use_avx_vnni(bool) { return false; }
#endif

#if defined(SACCADE_HAS_AMX_BF16)
namespace {

// AMX-TILE and AMX-BF16; not every compiler's builtin knows their names.
bool has_tiles() {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 24 & 1) && (d >> 22 & 1);
}

}  // namespace
#endif

#if defined(SACCADE_HAS_NEON_BF16)
namespace {

bool has_bf16_dot() {
#if defined(__linux__)
    constexpr unsigned long kBf16 = 1ul << 14, kBytes = 1ul << 13;  // HWCAP2_BF16, HWCAP2_I8MM
    constexpr unsigned long kByteDot = 1ul << 20;                   // HWCAP_ASIMDDP
    return !(~getauxval(AT_HWCAP2) & (kBf16 | kBytes)) && (getauxval(AT_HWCAP) & kByteDot);
#elif defined(__APPLE__)
    for (const char* name : {"hw.optional.arm.FEAT_BF16", "hw.optional.arm.FEAT_I8MM"}) {
        int has = 0;
        size_t size = sizeof has;
        if (sysctlbyname(name, &has, &size, nullptr, 0) != 0 || !has) return false;
    }
    return true;  // all of them have FEAT_DotProd
#else
    return false;
#endif
}

}  // namespace
#endif

const KernelSet* const* supported_kernels(int* count) {
    static const KernelSet* sets[4];  // as many as any architecture has
    static const int found = [] {
        int n = 0;
#if defined(SACCADE_HAS_AVX512_BF16)
        if (__builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
            __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
            __builtin_cpu_supports("avx512vnni")) {
#if defined(SACCADE_HAS_AMX_BF16)
            if (has_tiles() && ask_for_tiles()) sets[n++] = &amx_bf16_kernels();
#endif
            sets[n++] = &avx512_bf16_kernels;
        }
#endif
#if defined(SACCADE_HAS_AVX2)
        if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_half_conversion()) sets[n++] = &avx2_kernels;
#endif
#if defined(SACCADE_HAS_NEON_BF16)
        if (has_bf16_dot()) sets[n++] = &neon_bf16_kernels;
#endif
#if defined(SACCADE_HAS_NEON)
        sets[n++] = &neon_kernels;  // every AArch64 CPU
#endif
        sets[n++] = &portable_kernels;
        return n;
    }();
    *count = found;
    return sets;
}

}  // namespace saccade
