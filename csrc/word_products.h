// Decode's products with int8 rows where they lie: codes become 16-bit integers, and so do queries and weights, each by a
// scale of its own; sums of products are exact in 32 bits, of 64 channels of a key, or of a step's keys, and go on in
// float32 from there. A product of integers costs what one of bfloat16 pairs does, and codes need no more than a wider
// type; 15 bits of a query or a weight are more than bfloat16's 8.
#pragma once

#include "key_rows.h"
#include "math.h"

namespace saccade {
namespace {

constexpr float kMostWord = 32767.0f;
constexpr int kWordKeys = 32;  // of a step
constexpr float kLeastWeight = 1e-30f;

// Only for sets with Simd::has_word_dot; S is Simd, so that others need not have it.
template <class S>
struct WordProducts {
    using I = typename S::I;
    static constexpr int kVectors = kScaled / (2 * W);  // of words that share a scale

    int64_t d;

    int64_t scales() const { return d / kScaled; }

    // One head's query as words; returns what they are multiples of.
    float take_query(const uint16_t* from, int16_t* to) const {
        float most = 0, rounded[kScaled];
        bool finite = true;
        for (int64_t c = 0; c < d; ++c) {
            const float x = std::fabs(from_half(from[c]));
            most = x > most ? x : most;
            finite &= x < __builtin_inff();
        }
        if (!finite || most <= kLeastWeight) {  // what is no number stays none
            std::memset(to, 0, d * sizeof *to);
            return finite ? 0.0f : __builtin_nanf("");
        }
        const float inverse = kMostWord / most;
        for (int64_t c = 0; c < d; c += kScaled) {
            for (int64_t i = 0; i < kScaled; ++i) rounded[i] = nearest(from_half(from[c + i]) * inverse);
            for (int64_t i = 0; i < kScaled; ++i) to[c + i] = static_cast<int16_t>(rounded[i]);
        }
        return most / kMostWord;
    }

    // The scales of `count` rows: [scales()][kWordKeys], 0 behind the last.
    void find_scales(const char* pool, const int64_t* at, int count, float* to) const {
        for (int64_t g = 0; g < scales(); ++g) {
            float* own = to + g * kWordKeys;
            for (int j = 0; j < count; ++j) own[j] = scale_at(pool + at[j] + d + g * static_cast<int64_t>(sizeof(uint16_t)));
            for (int j = count; j < kWordKeys; ++j) own[j] = 0;
        }
    }

    // s[head][key] = q . k, raw. `ask` is called once for four rows.
    template <int HT, class Ask>
    void scores(const int16_t* q, const float* q_scale, const char* pool, const int64_t* at, int count,
                const float* scales_of, float* s, int64_t stride, const Ask& ask) const {
        for (int j = 0; j < count; j += 4) {
            const int8_t* row[4];
            for (int r = 0; r < 4; ++r)
                row[r] = reinterpret_cast<const int8_t*>(pool + at[j + r < count ? j + r : count - 1]);
            ask();
            F acc[HT][4];
            for (auto& head : acc)
                for (F& x : head) x = S::set1(0);
            for (int64_t g = 0; g < scales(); ++g) {
                const int16_t* query = q + g * kScaled;
                for (int r = 0; r < 4; ++r) {
                    I x[kVectors];
                    for (int n = 0; n < kVectors; ++n) x[n] = S::load_words(row[r] + g * kScaled + n * 2 * W);
                    const F scale = S::set1(scales_of[g * kWordKeys + j + r]);
                    for (int h = 0; h < HT; ++h) {
                        I sum = S::zero_int();
                        for (int n = 0; n < kVectors; ++n)
                            sum = S::dot_words(
                                sum, x[n], S::load_int(reinterpret_cast<const int32_t*>(query + h * d + n * 2 * W)));
                        acc[h][r] = S::fma(S::to_float(sum), scale, acc[h][r]);
                    }
                }
            }
            for (int h = 0; h < HT; ++h) S::sum4(acc[h], s + h * stride + j);
        }
        for (int h = 0; h < HT; ++h)
            for (int j = 0; j < kWordKeys; j += W)
                S::store(s + h * stride + j, S::mul(S::load(s + h * stride + j), S::set1(q_scale[h])));
    }

    // o[head] = o * alpha + sum over keys of p * v; p [head][kWordKeys], 0 behind the last key. `words` has room for
    // HT * kWordKeys.
    template <int HT, class Ask>
    void values(const float* p, int64_t stride, const char* pool, const int64_t* at, int count, const float* scales_of,
                const float* alpha, float* o, int16_t* words, const Ask& ask) const {
        for (int64_t g = 0; g < scales(); ++g) {
            float factor[HT];
            for (int h = 0; h < HT; ++h)
                factor[h] = take_weights(p + h * stride, scales_of + g * kWordKeys, words + h * kWordKeys);
            I sum[HT][2 * kVectors];
            for (auto& head : sum)
                for (I& x : head) x = S::zero_int();
            for (int j = 0; j < count; j += 2) {
                ask();
                const int8_t* first = reinterpret_cast<const int8_t*>(pool + at[j]) + g * kScaled;
                const int8_t* second = first;  // an absent key has weight 0
                if (j + 1 < count) second = reinterpret_cast<const int8_t*>(pool + at[j + 1]) + g * kScaled;
                I pairs[2 * kVectors];
                for (int n = 0; n < kVectors; ++n)
                    S::pair_words(S::load_words(first + n * 2 * W), S::load_words(second + n * 2 * W), pairs + 2 * n);
                for (int h = 0; h < HT; ++h) {
                    int32_t w;
                    std::memcpy(&w, words + h * kWordKeys + j, sizeof w);
                    const I both = S::ints(w);
                    for (int n = 0; n < 2 * kVectors; ++n) sum[h][n] = S::dot_words(sum[h][n], pairs[n], both);
                }
            }
            for (int h = 0; h < HT; ++h) {
                const F shrink = S::set1(alpha[h]), by = S::set1(factor[h]);
                for (int n = 0; n < 2 * kVectors; n += 2) {
                    I ordered[2];
                    S::order_words(sum[h][n], sum[h][n + 1], ordered);
                    float* to = o + h * d + g * kScaled + n * W;
                    S::store(to, S::fma(S::to_float(ordered[0]), by, S::mul(S::load(to), shrink)));
                    S::store(to + W, S::fma(S::to_float(ordered[1]), by, S::mul(S::load(to + W), shrink)));
                }
            }
        }
    }

  private:
    // A step's weights times its rows' scales as words; returns what they are multiples of: not a number where one is
    // none.
    float take_weights(const float* p, const float* scale, int16_t* to) const {
        F x[kWordKeys / W], most = S::set1(0), broken = S::set1(0);
        for (int n = 0; n < kWordKeys / W; ++n) {
            x[n] = S::mul(S::load(p + n * W), S::load(scale + n * W));
            most = S::max(most, x[n]);
            broken = S::add(broken, S::sub(x[n], x[n]));
        }
        const float top = S::max_lane(most), nothing = S::sum(broken);
        if (nothing != 0 || !(top > kLeastWeight)) {
            std::memset(to, 0, kWordKeys * sizeof *to);
            return nothing;
        }
        const F inverse = S::set1(kMostWord / top);
        for (int n = 0; n < kWordKeys / W; ++n) S::store_words(to + n * W, S::mul(x[n], inverse));
        return top / kMostWord;
    }
};

}  // namespace
}  // namespace saccade
