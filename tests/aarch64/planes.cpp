// Products and values of weights in planes on one instruction set against those of the portable kernels, bit for bit:
// every format, 1 to 16 rows. The portable ones are compiled with -ffp-contract=fast, for the others fuse what they add.
// run.sh compiles this for AArch64 and runs it under qemu.
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include "half.h"
#include "kernels.h"

using namespace saccade;

namespace {

struct Block {  // of coded rows: CodedBlock in csrc/activation_codes.h
    float scale, sums[2], sum, scaled_sum;
    int8_t codes[32];
};

constexpr int64_t kRows = 16, kOutputs = 80, kChannels = 512;

std::mt19937 random_bits(1);

std::vector<uint8_t> weights(WeightFormat format) {
    const PlaneTraits traits = plane_traits(format);
    const int64_t record = record_bytes(traits), bytes = kOutputs / kGroupRows * group_bytes(traits, kChannels);
    std::vector<uint8_t> made(bytes);
    for (uint8_t& b : made) b = static_cast<uint8_t>(random_bits());
    const Scales kind = traits.scales;
    const bool two = kind == Scales::half_least || kind == Scales::packed || kind == Scales::packed16;
    for (int64_t at = 0; at < bytes; at += record) {
        if (kind == Scales::exponent)
            for (int64_t r = 0; r < kGroupRows; ++r) made[at + r] = static_cast<uint8_t>(118 + made[at + r] % 8);
        else
            for (int64_t i = 1; i < (two ? 64 : 32); i += 2)  // 0.004 or so, of either sign; small as bfloat16, too
                made[at + i] = static_cast<uint8_t>((made[at + i] & 0x80) | 0x1c);
    }
    return made;
}

std::vector<Block> coded() {
    std::vector<Block> made(kRows * kChannels / kBlock);
    for (Block& b : made) {
        b.scale = static_cast<float>(1 + random_bits() % 1000) * 1e-3f;
        for (int half = 0; half < 2; ++half) {
            b.sums[half] = 0;
            for (int i = 16 * half; i < 16 * half + 16; ++i) {
                b.codes[i] = static_cast<int8_t>(static_cast<int>(random_bits() % 255) - 127);
                b.sums[half] += b.codes[i];
            }
        }
        b.sum = b.sums[0] + b.sums[1];
        b.scaled_sum = b.scale * b.sum;
    }
    return made;
}

std::vector<float> product(const PlaneKernels& kernels, const RowMatrix& m, Storage storage, const void* x,
                           int64_t rows) {
    std::vector<float> y(kRows * kOutputs, 0.0f);
    kernels.task({storage, &m, kChannels, x, rows, 0, kOutputs - 3, y.data(), kOutputs, true});
    return y;
}

template <class T>
std::vector<T> values(const PlaneKernels& kernels, const RowMatrix& m, Storage storage) {
    std::vector<T> out((kOutputs - 7) * kChannels);
    kernels.rows({storage, 1, m, kChannels, nullptr, 5, kOutputs - 7, out.data()});
    return out;
}

template <class T>
int unequal(const std::vector<T>& a, const std::vector<T>& b) {
    return std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) != 0;
}

int compare(const char* name, const PlaneKernels& own) {
    int bad = 0;
    for (int number = 1; number < static_cast<int>(WeightFormat::count); ++number) {
        const auto format = static_cast<WeightFormat>(number);
        const std::vector<uint8_t> stored = weights(format);
        const RowMatrix m{stored.data(), nullptr, kOutputs, format};
        const std::vector<Block> codes = coded();
        std::vector<float> x(kRows * kChannels);
        for (float& v : x) v = static_cast<float>(static_cast<int>(random_bits() % 2001) - 1000) * 1e-3f;
        const PlaneKernels& known = portable_planes;
        int lost = unequal(values<float>(own, m, Storage::fp32), values<float>(known, m, Storage::fp32));
        lost += 2 * unequal(values<uint16_t>(own, m, Storage::bf16), values<uint16_t>(known, m, Storage::bf16));
        for (int64_t rows = 1; rows <= kRows; ++rows) {
            lost |= 4 * unequal(product(own, m, Storage::bf16, codes.data(), rows),
                                product(known, m, Storage::bf16, codes.data(), rows));
            lost |= 8 * unequal(product(own, m, Storage::fp32, x.data(), rows),
                                product(known, m, Storage::fp32, x.data(), rows));
        }
        if (lost) std::printf("%s: %s differs (%d)\n", name, kPlaneNames[number - 1], lost);
        bad += lost != 0;
    }
    constexpr int all = static_cast<int>(WeightFormat::count) - 1;
    std::printf("%s: %d of %d formats differ from the portable kernels'\n", name, bad, all);
    return bad;
}

}  // namespace

int main() {
    int bad = 0;
#if defined(__aarch64__)
    bad += compare("neon", neon_planes);
    bad += compare("neon_bf16", neon_bf16_planes);
#else
    bad += compare("avx2", avx2_planes);
#if defined(SACCADE_HAS_AVX_VNNI)
    bad += compare("avx_vnni", avx_vnni_planes);
#endif
    bad += compare("avx512_bf16", avx512_bf16_planes);
#endif
    return bad != 0;
}
