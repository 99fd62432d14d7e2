// Sums of 4-bit codes times weights, for tiles of 16 blocks: codes of 8 channels of a block lie in 4 bytes, those of
// channels 0 to 3 in the low halves and of 4 to 7 in the high ones, and behind them those of the next block. Where a CPU
// multiplies bytes, weights are rounded to two of them each; by how much is known.
#pragma once

#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "math.h"

namespace saccade {
namespace {

constexpr int64_t kCodeTile = 16;                // blocks whose codes lie together
constexpr int64_t kCodeParts = kCodeTile / W;    // vectors of them
constexpr int64_t kStepBytes = 4 * kCodeTile;    // of 8 channels of a tile

template <class V>
struct FloatCodes {
    static constexpr int64_t kRows = 4;  // that are summed side by side, at most

    // Floats that a row's weights take.
    static int64_t room(int64_t channels) { return channels; }

    // Writes a row's weights down; returns the sum of what was rounded off them.
    static double write(const float* w, int64_t channels, float* to) {
        std::memcpy(to, w, channels * sizeof *w);
        return 0;
    }

    // sums[j] of a tile: code times weight over all channels, by row j of those from `weights` on.
    template <int R>
    static SACCADE_INLINE void sum(const uint8_t* codes, int64_t channels, const float* weights,
                                   F (&sums)[R][kCodeParts]) {
        F acc[2][R][kCodeParts];  // two sums that do not wait for each other
        for (auto& half : acc)
            for (auto& row : half)
                for (F& x : row) x = V::set1(0);
        for (int64_t c = 0; c < channels; c += 8, codes += kStepBytes) {
            V::prefetch(codes + 2048);
            for (int64_t part = 0; part < kCodeParts; ++part) {
                I left = V::load_int(reinterpret_cast<const int32_t*>(codes) + part * W);
                for (int i = 0; i < 8; ++i, left = V::high_bits(left)) {
                    const F code = V::to_float(V::low_bits(left));
                    const float* w = weights + c + 4 * (i & 1) + i / 2;
                    for (int j = 0; j < R; ++j)
                        acc[i & 1][j][part] = V::fma(code, V::set1(w[j * channels]), acc[i & 1][j][part]);
                }
            }
        }
        for (int j = 0; j < R; ++j)
            for (int64_t part = 0; part < kCodeParts; ++part) sums[j][part] = V::add(acc[0][j][part], acc[1][j][part]);
    }
};

// A weight is 128 a + b times the row's scale, a and b bytes; of 8 channels first those a that go with low halves, then
// those that go with high ones, then b.
template <class V>
struct ByteCodes {
    static constexpr int64_t kRows = 4;

    static int64_t room(int64_t channels) { return channels / 2 + 1; }

    static double write(const float* w, int64_t channels, float* to) {
        constexpr float kMost = 127 * 128;
        float most = 0;
        bool finite = true;
        for (int64_t c = 0; c < channels; ++c) {
            finite = finite && std::fabs(w[c]) <= std::numeric_limits<float>::max();
            most = std::fabs(w[c]) > most ? std::fabs(w[c]) : most;
        }
        // Of what cannot be divided by, everything is rounded off; of what means nothing, all sums are NaN.
        const float scale = !finite ? std::numeric_limits<float>::quiet_NaN() : most > 1e-30f ? most / kMost : 0;
        int8_t* bytes = reinterpret_cast<int8_t*>(to + 1);
        double off = 0;
        *to = scale;
        for (int64_t c = 0; c < channels; ++c) {
            const float x = scale > 0 ? w[c] / scale : 0;
            const int whole = static_cast<int>(std::lrintf(x < -kMost ? -kMost : x > kMost ? kMost : x));
            const int a = static_cast<int>(std::lrintf(static_cast<float>(whole) / 128));
            int8_t* own = bytes + c / 8 * 16 + c % 8;
            own[0] = static_cast<int8_t>(a);
            own[8] = static_cast<int8_t>(whole - 128 * a);
            off += std::fabs(static_cast<double>(w[c]) - static_cast<double>(scale) * whole);
        }
        return off;
    }

    template <int R>
    static SACCADE_INLINE void sum(const uint8_t* codes, int64_t channels, const float* weights,
                                   F (&sums)[R][kCodeParts]) {
        constexpr int kChains = W == 16 ? 2 : 1;  // sums that do not wait for each other, as registers allow
        const int64_t stride = room(channels);
        for (int64_t part = 0; part < kCodeParts; ++part) {
            I a[R][kChains], b[R][kChains];
            for (int j = 0; j < R; ++j)
                for (int i = 0; i < kChains; ++i) a[j][i] = b[j][i] = V::zero_int();
            const uint8_t* from = codes + part * 4 * W;
            const float* w = weights + 1;
            for (int64_t c = 0; c < channels; c += 8, from += kStepBytes, w += 4) {
                V::prefetch(from + 2048);
                const I both = V::load_int(reinterpret_cast<const int32_t*>(from));
                const I low = V::low_halves(both), high = V::high_halves(both);
                for (int j = 0; j < R; ++j) {
                    int32_t own[4];
                    std::memcpy(own, w + j * stride, sizeof own);
                    a[j][0] = V::dot_bytes(a[j][0], low, own[0]);
                    a[j][kChains - 1] = V::dot_bytes(a[j][kChains - 1], high, own[1]);
                    b[j][0] = V::dot_bytes(b[j][0], low, own[2]);
                    b[j][kChains - 1] = V::dot_bytes(b[j][kChains - 1], high, own[3]);
                }
            }
            for (int j = 0; j < R; ++j) {
                const F first = kChains == 2 ? V::add(V::to_float(a[j][0]), V::to_float(a[j][1])) : V::to_float(a[j][0]);
                const F rest = kChains == 2 ? V::add(V::to_float(b[j][0]), V::to_float(b[j][1])) : V::to_float(b[j][0]);
                sums[j][part] = V::mul(V::fma(first, V::set1(128), rest), V::set1(weights[j * stride]));
            }
        }
    }
};

using CodeSums = std::conditional_t<Simd::has_byte_dot, ByteCodes<Simd>, FloatCodes<Simd>>;

}  // namespace
}  // namespace saccade
