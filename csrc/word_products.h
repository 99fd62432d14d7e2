// Decode's products with int8 rows where they lie. Keys: a vector's lanes are keys, whose codes are turned once for all
// query heads, four channels to a lane, and meet queries of 16 bits in two bytes. Values: codes become 16-bit
// integers, and so do weights. Each query and each step's weights have a scale of their own; sums of products are exact
// in 32 bits, over 64 channels of a key or over a step's keys, and go on in float32 from there. 15 bits of a query or a
// weight are more than bfloat16's 8.
#pragma once

#include "key_rows.h"
#include "math.h"

namespace saccade {
namespace {

constexpr float kMostWord = 32767.0f;
constexpr float kMostQuery = 127 * 256 + 127;  // in two bytes with a sign each
constexpr int kWordKeys = 32;  // of a step
constexpr float kLeastWeight = 1e-30f;

// bf16 storage on CPUs with few bf16 dot products: fp32 arithmetic, but for codes where they lie.
struct WordMath : Fp32Math {};

// Only for sets with Simd::has_word_dot; S is Simd, so that others need not have it.
template <class S>
struct WordProducts {
    using I = typename S::I;
    static constexpr int kVectors = kScaled / (2 * W);  // of words that share a scale
    static constexpr int kTurned = kScaled / 4;         // vectors of W keys' codes, four channels in a lane

    int64_t d;

    int64_t scales() const { return d / kScaled; }
    // Bytes of a query, and of a step's keys when they are turned.
    int64_t query_bytes() const { return 2 * d; }
    int64_t turned_bytes() const { return kWordKeys * d; }

    // One head's query as integers of 15 bits and a sign in two bytes each: of the channels that share a scale the high
    // bytes, then the low ones. `bias` [scales()]: 128 times the sum of these channels. Returns what the integers are
    // multiples of.
    float take_query(const uint16_t* from, int8_t* to, int32_t* bias) const {
        F most = S::set1(0), broken = S::set1(0);
        for (int64_t c = 0; c < d; c += W) {
            const F x = S::load_row(from + c);
            most = S::max(most, S::abs(x));
            broken = S::add(broken, S::sub(x, x));
        }
        const float top = S::max_lane(most), nothing = S::sum(broken);
        const bool some = nothing == 0 && top > kLeastWeight;  // what is no number stays none
        const F inverse = S::set1(some ? kMostQuery / top : 0), shift = S::set1(12582912.0f);  // 1.5 * 2^23: nearest()
        for (int64_t g = 0; g < scales(); ++g, to += 2 * kScaled) {
            F sum = S::set1(0);
            for (int64_t c = 0; c < kScaled; c += W) {
                const F x = S::add(S::mul(S::load_row(from + g * kScaled + c), inverse), shift);
                sum = S::add(sum, S::sub(x, shift));
                const I bits = S::as_int(x);  // the integer's own in the lower half
                S::store_bytes(to + c, S::template right<8>(S::add_int(bits, S::ints(128))));
                S::store_bytes(to + kScaled + c, bits);
            }
            bias[g] = some ? 128 * static_cast<int32_t>(S::sum(sum)) : 0;
        }
        return some ? top / kMostQuery : nothing;
    }

    // The scales of `count` rows: [scales()][kWordKeys], 0 behind the last.
    void find_scales(const char* pool, const int64_t* at, int count, float* to) const {
        const I upper = S::ints(static_cast<int32_t>(0xffff0000u));
        int64_t g = 0;
        for (; g + 2 <= scales(); g += 2) {  // two lie side by side
            alignas(64) int32_t both[kWordKeys];
            for (int j = 0; j < count; ++j)
                std::memcpy(both + j, pool + at[j] + d + g * static_cast<int64_t>(sizeof(uint16_t)), sizeof *both);
            for (int j = count; j < kWordKeys; ++j) both[j] = 0;
            for (int n = 0; n < kWordKeys; n += W) {
                const I x = S::load_int(both + n);
                S::store(to + g * kWordKeys + n, S::as_float(S::template left<16>(x)));
                S::store(to + (g + 1) * kWordKeys + n, S::as_float(S::bit_and(x, upper)));
            }
        }
        if (g == scales()) return;
        const char* last = pool + d + g * static_cast<int64_t>(sizeof(uint16_t));
        to += g * kWordKeys;
        for (int j = 0; j < count; ++j) to[j] = scale_at(last + at[j]);
        for (int j = count; j < kWordKeys; ++j) to[j] = 0;
    }

    // The codes of `count` rows plus 128, lanes being keys: [vector of keys][scales()][kTurned] vectors. `ask` is
    // called for as many rows as are read.
    template <class Ask>
    void turn(const char* pool, const int64_t* at, int count, int32_t* to, const Ask& ask) const {
        static_assert(S::W == kTurned);
        int64_t last[W];
        for (int j = 0; j < count; j += W) {
            const int64_t* row = at + j;  // stays in memory: there are fewer registers than rows
            if (count - j < W) {
                for (int r = 0; r < W; ++r) last[r] = at[j + r < count ? j + r : count - 1];
                row = last;
            }
            for (int64_t g = 0; g < scales(); ++g) {
                F x[W];
                const char* from = pool + g * kScaled;
                for (int r = 0; r < W; ++r)
                    x[r] = S::as_float(S::flip_bytes(S::load_int(reinterpret_cast<const int32_t*>(from + row[r]))));
                S::transpose(x);
                for (int r = 0; r < W; ++r, to += W) S::store(reinterpret_cast<float*>(to), x[r]);
                if (g == 0) ask(W);
            }
        }
    }

    // s[head][key] = q . k, raw, of keys that are turned.
    template <int HT>
    void scores(const int8_t* q, const float* q_scale, const int32_t* bias, const int32_t* turned, int count,
                const float* scales_of, float* s, int64_t stride) const {
        const int32_t* query = reinterpret_cast<const int32_t*>(q);
        for (int j = 0; j < count; j += W) {
            F total[HT];
            for (F& x : total) x = S::set1(0);
            for (int64_t g = 0; g < scales(); ++g, turned += kTurned * W) {
                I high[HT], low[HT];
                for (int h = 0; h < HT; ++h) high[h] = S::zero_int(), low[h] = S::ints(-bias[h * scales() + g]);
                for (int i = 0; i < kTurned; ++i) {
                    const I x = S::load_int(turned + i * W);
                    for (int h = 0; h < HT; ++h) {
                        const int32_t* four = query + (h * d + g * kScaled) / 2 + i;
                        high[h] = S::dot_four(high[h], x, four);
                        low[h] = S::dot_four(low[h], x, four + kTurned);
                    }
                }
                const F scale = S::load(scales_of + g * kWordKeys + j);
                for (int h = 0; h < HT; ++h) {
                    const I sum = S::add_int(S::template left<8>(high[h]), low[h]);
                    total[h] = S::fma(S::to_float(sum), scale, total[h]);
                }
            }
            for (int h = 0; h < HT; ++h) S::store(s + h * stride + j, S::mul(total[h], S::set1(q_scale[h])));
        }
    }

    // Weights p [head][kWordKeys], 0 behind the last key, times the scales of a step's rows, as words [head][scales()]
    // [kWordKeys]; `factor` [head][scales()] is what these are multiples of: not a number where a product is none.
    template <int HT>
    void take_weights(const float* p, int64_t stride, const float* scales_of, int16_t* words, float* factor) const {
        const int64_t n = scales();
        for (int64_t g = 0; g < n; ++g)
            for (int h = 0; h < HT; ++h) {
                F x[kWordKeys / W], most = S::set1(0), broken = S::set1(0);
                for (int j = 0; j < kWordKeys / W; ++j) {
                    x[j] = S::mul(S::load(p + h * stride + j * W), S::load(scales_of + g * kWordKeys + j * W));
                    most = S::max(most, x[j]);
                    broken = S::add(broken, S::sub(x[j], x[j]));
                }
                const float top = S::max_lane(most), nothing = S::sum(broken);
                const bool some = nothing == 0 && top > kLeastWeight;
                const F inverse = S::set1(some ? kMostWord / top : 0);
                for (int j = 0; j < kWordKeys / W; ++j)
                    S::store_words(words + (h * n + g) * kWordKeys + j * W, S::mul(x[j], inverse));
                factor[h * n + g] = some ? top / kMostWord : nothing;
            }
    }

    // o[head] = o * alpha + sum over keys of words * factor * codes. `ask` is called for as many rows as are read.
    template <int HT, class Ask>
    void values(const int16_t* words, const float* factor, const char* pool, const int64_t* at, int count,
                const float* alpha, float* o, const Ask& ask) const {
        const int64_t n = scales();
        for (int64_t g = 0; g < n; ++g) {
            I sum[HT][2 * kVectors];
            for (auto& head : sum)
                for (I& x : head) x = S::zero_int();
            const char* from = pool + g * kScaled;
            const int16_t* pairs_of = words + g * kWordKeys;
            for (int j = 0; j < count; j += 2) {
                if (g == 0) ask(2);
                const int8_t* first = reinterpret_cast<const int8_t*>(from + at[j]);
                const int8_t* second = j + 1 < count ? reinterpret_cast<const int8_t*>(from + at[j + 1]) : first;
                I pairs[2 * kVectors];
                for (int v = 0; v < kVectors; ++v)
                    S::pair_words(S::load_words(first + v * 2 * W), S::load_words(second + v * 2 * W), pairs + 2 * v);
                for (int h = 0; h < HT; ++h) {
                    int32_t w;
                    std::memcpy(&w, pairs_of + h * n * kWordKeys + j, sizeof w);
                    const I both = S::ints(w);
                    for (int v = 0; v < 2 * kVectors; ++v) sum[h][v] = S::dot_words(sum[h][v], pairs[v], both);
                }
            }
            for (int h = 0; h < HT; ++h) {
                const F shrink = S::set1(alpha[h]), by = S::set1(factor[h * n + g]);
                for (int v = 0; v < 2 * kVectors; v += 2) {
                    I ordered[2];
                    S::order_words(sum[h][v], sum[h][v + 1], ordered);
                    float* to = o + h * d + g * kScaled + v * W;
                    S::store(to, S::fma(S::to_float(ordered[0]), by, S::mul(S::load(to), shrink)));
                    S::store(to + W, S::fma(S::to_float(ordered[1]), by, S::mul(S::load(to + W), shrink)));
                }
            }
        }
    }
};

// Of a task's queries and of a step of rows of codes where they lie.
template <class S>
struct WordRoom {
    int8_t* query = nullptr;     // queries as bytes
    int32_t* bias = nullptr;     // of their products with codes plus 128
    float* unit = nullptr;       // what queries are multiples of
    float* scales = nullptr;     // of a step's rows
    int32_t* turned = nullptr;   // a step's keys
    int16_t* weights = nullptr;  // of a tile's heads, as words
    float* factor = nullptr;     // what these are multiples of

    WordRoom() = default;
    // Of `queries` heads, of which a tile has `heads`.
    WordRoom(Carver& c, const WordProducts<S>& of, int64_t queries, int64_t heads)
        : query(c.take<int8_t>(queries * of.query_bytes())), bias(c.take<int32_t>(queries * of.scales())),
          unit(c.take<float>(queries)), scales(c.take<float>(of.scales() * kWordKeys)),
          turned(c.take<int32_t>(of.turned_bytes() / 4)),
          weights(c.take<int16_t>(heads * of.scales() * kWordKeys)),
          factor(c.take<float>(heads * of.scales())) {}
};

}  // namespace
}  // namespace saccade
