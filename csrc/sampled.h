// Keys in buckets by hash code, the keys that share enough buckets with a query, what corrects for each one's chance to be
// among them, and attention over such lists.
#pragma once

#include "decode_task.h"

namespace saccade {
namespace {

// Counting sort of each row of codes: which keys have which code, in rising order.
void fill_buckets(const HashBuckets& b) {
    parallel_for(
        b.rows, b.threads,
        [](void* context, int64_t row) {
            const HashBuckets& c = *static_cast<const HashBuckets*>(context);
            const int16_t* codes = c.codes + row * c.keys;
            int32_t *starts = c.starts + row * (c.buckets + 1), *order = c.order + row * c.keys;
            std::memset(starts, 0, (c.buckets + 1) * sizeof(int32_t));
            for (int64_t i = 0; i < c.keys; ++i) ++starts[codes[i]];
            int32_t before = 0;
            for (int64_t code = 0; code <= c.buckets; ++code) {
                const int32_t here = starts[code];
                starts[code] = before;
                before += here;
            }
            for (int64_t i = 0; i < c.keys; ++i) order[starts[codes[i]]++] = static_cast<int32_t>(i);
            for (int64_t code = c.buckets; code > 0; --code) starts[code] = starts[code - 1];
            starts[0] = 0;
        },
        const_cast<HashBuckets*>(&b));
}

template <class T>
struct DrawTask {
    const HashDraw& c;

    // The keys of one query head: all before `first`, those that share two buckets with it, all from `last` on.
    void run(int64_t head) const {
        const Attention& a = c.attention;
        const int64_t kv_head = head / (a.heads / a.kv_heads), d = a.head_dim, hashed = c.last - c.first;
        const int64_t rounded = (hashed + 7) / 8 * 8, buckets = int64_t{1} << c.bits;
        const KeyRows rows(a, kv_head);
        const KeyReader<T> keys(a);
        Carver count(nullptr);
        count.take<uint8_t>(rounded);
        count.take<const int32_t*>(2 * c.tables);
        count.take<float>(d);
        keys.carve(count, 1);
        Carver carver(static_cast<char*>(thread_scratch(count.used())));
        uint8_t* seen = carver.take<uint8_t>(rounded);
        const int32_t** runs = carver.take<const int32_t*>(2 * c.tables);
        float* q = carver.take<float>(d);
        const typename RowReader<T>::Room room = keys.carve(carver, 1);
        std::memset(seen, 0, rounded);
        for (int64_t t = 0; t < c.tables; ++t) {
            const int64_t row = kv_head * c.tables + t;
            const int32_t* start = c.starts + row * (buckets + 1) + c.asked[head * c.tables + t];
            runs[2 * t] = c.order + row * hashed + start[0];
            runs[2 * t + 1] = c.order + row * hashed + start[1];
            Simd::prefetch(runs[2 * t]);
        }
        for (int64_t t = 0; t < c.tables; ++t)
            for (const int32_t* key = runs[2 * t]; key < runs[2 * t + 1]; ++key) seen[*key] += seen[*key] < 2;
        int32_t* list = c.indices + head * c.room;
        float* bias = c.bias + head * c.room;
        int64_t found = 0;
        for (int64_t i = 0; i < c.first; ++i) list[found++] = static_cast<int32_t>(i);
        for (int64_t i = 0; i < rounded; i += 8) {
            uint64_t eight;
            std::memcpy(&eight, seen + i, sizeof eight);
            for (eight &= 0x0202020202020202u; eight; eight &= eight - 1)
                list[found++] = static_cast<int32_t>(c.first + i + __builtin_ctzll(eight) / 8);
        }
        const int64_t drawn = found;
        for (int64_t i = c.last; i < c.length; ++i) list[found++] = static_cast<int32_t>(i);
        c.counts[head] = found;
        for (int64_t j = 0; j < found; ++j) bias[j] = 0;
        F square = Simd::set1(0);
        for (int64_t i = 0; i < d; i += W) {
            const F x = Simd::load_row(static_cast<const T*>(a.q) + head * a.q_head_stride + i);
            square = Simd::fma(x, x, square);
            Simd::store(q + i, x);
        }
        const double size = Simd::sum(square);
        for (int64_t j = c.first; j < drawn; ++j) {
            if (j + 8 < drawn) keys.prefetch(rows(list[j + 8]));
            bias[j] = static_cast<float>(correction(keys.read(rows(list[j]), room), q, c.mean + kv_head * d, size));
        }
    }

    // -ln of the chance that a key agrees with the query in two tables or more, and the guard.
    double correction(const T* key, const float* q, const float* mean, double size) const {
        F dot = Simd::set1(0), square = Simd::set1(0);
        for (int64_t i = 0; i < c.attention.head_dim; i += W) {
            const F x = Simd::sub(Simd::load_row(key + i), Simd::load(mean + i));
            dot = Simd::fma(x, Simd::load(q + i), dot);
            square = Simd::fma(x, x, square);
        }
        const double norms = __builtin_sqrt(size * Simd::sum(square));
        double cosine = norms > 1e-8 ? Simd::sum(dot) / norms : 0;
        cosine = cosine > 1 ? 1 : cosine < -1 ? -1 : cosine;
        const double side = 1 - __builtin_acos(cosine) / 3.14159265358979323846;
        double p = 1;
        for (int64_t i = 0; i < c.bits; ++i) p *= side;
        const double tables = static_cast<double>(c.tables);
        const double missed = p < 1 ? __builtin_exp((tables - 1) * __builtin_log1p(-p)) : 0;
        const double chance = 1 - missed * (1 - p + tables * p);
        return -__builtin_log((chance > 0 ? chance : 0) + c.guard);
    }
};

template <class T>
void draw_typed(const HashDraw& c) {
    DrawTask<T> task{c};
    parallel_for(
        c.attention.heads, c.attention.threads,
        [](void* context, int64_t head) { static_cast<DrawTask<T>*>(context)->run(head); }, &task);
    c.offsets[0] = 0;  // the lists, one behind the other
    for (int64_t head = 0; head < c.attention.heads; ++head) {
        const int64_t to = c.offsets[head], count = c.counts[head];
        std::memmove(c.indices + to, c.indices + head * c.room, count * sizeof(int32_t));
        std::memmove(c.bias + to, c.bias + head * c.room, count * sizeof(float));
        c.offsets[head + 1] = to + count;
    }
}

// Adds each key's bias to its logit.
struct BiasTally {
    static constexpr bool wanted = false, shifts = true;
    const float* next;
    void shift(float* s, int count) {
        for (int j = 0; j < count; ++j) s[j] += next[j] * kLog2e;
        next += count;
    }
};

// The keys of a list.
class ListedKeys {
  public:
    static constexpr bool prefetches = false;
    ListedKeys(const Attention& a, int64_t kv_head, const int32_t* first, const int32_t* last)
        : row_of_(a, kv_head), next_(first), last_(last) {}

    bool fill(KeyStep<kDecodeStep>& step) {
        step.count = 0;
        for (; next_ < last_ && step.count < kDecodeStep; ++next_, ++step.count)
            step.row[step.count] = row_of_(*next_);
        return step.count > 0;
    }

  private:
    const KeyRows row_of_;
    const int32_t *next_, *last_;
};

template <class Math, class T>
void sampled_typed(const SampledCall& c) {
    parallel_for(
        c.attention.heads, c.attention.threads,
        [](void* context, int64_t head) {
            const SampledCall& call = *static_cast<const SampledCall*>(context);
            const Attention& a = call.attention;
            BiasTally bias{call.bias + call.offsets[head]};
            float* o = call.sums + head * a.head_dim;
            float max, sum;
            DecodeTask<Math, T, BiasTally> task(a, 0, head, 1, 1, 1, o, &max, &sum, nullptr, &bias);
            ListedKeys keys(a, head / (a.heads / a.kv_heads), call.indices + call.offsets[head],
                            call.indices + call.offsets[head + 1]);
            task.run(keys);
            const F inverse = Simd::set1(share_of(sum));
            T* out = static_cast<T*>(a.out) + head * a.out_rows * a.head_dim;
            for (int64_t i = 0; i < a.head_dim; i += W)
                Simd::store_row(out + i, Simd::mul(Simd::load(o + i), inverse));
            a.lse[head * a.out_rows] = lse_of(max, sum);
        },
        const_cast<SampledCall*>(&c));
}

}  // namespace
}  // namespace saccade
