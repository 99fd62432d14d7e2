// What a decoder layer of the Llama shape does to the values of a few rows between its products: norms, rotations,
// gated activations. Values are rounded to the storage type wherever the layer's own modules would round them.
#pragma once

#include <cmath>

#include "row_products.h"

namespace saccade {
namespace {
namespace layer {

// y = weight * round(x / rms(x)) over `n` channels whose squares have this `sum`, their mean raised by epsilon.
template <class T>
void scale_row(const T* x, const T* weight, float sum, double epsilon, int64_t n, T* y) {
    const float scale = 1.0f / std::sqrt(sum / static_cast<float>(n) + static_cast<float>(epsilon));
    const F factor = Simd::set1(scale);
    int64_t i = 0;
    for (; i + W <= n; i += W)
        Simd::store_row(y + i,
                        Simd::mul(Simd::load_row(weight + i), rounded<T>(Simd::mul(Simd::load_row(x + i), factor))));
    for (; i < n; ++i) store_value(y + i, to_float(weight[i]) * rounded<T>(to_float(x[i]) * scale));
}

template <class T>
void rms_norm(const T* x, const T* weight, double epsilon, int64_t n, T* y) {
    F acc = Simd::set1(0);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        F v = Simd::load_row(x + i);
        acc = Simd::fma(v, v, acc);
    }
    float sum = Simd::sum(acc);
    for (; i < n; ++i) sum += to_float(x[i]) * to_float(x[i]);
    scale_row(x, weight, sum, epsilon, n, y);
}

// rms_norm of x += more, in place.
template <class T>
void add_norm(T* x, const T* more, const T* weight, double epsilon, int64_t n, T* y) {
    F acc = Simd::set1(0);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        F v = rounded<T>(Simd::add(Simd::load_row(x + i), Simd::load_row(more + i)));
        Simd::store_row(x + i, v);
        acc = Simd::fma(v, v, acc);
    }
    float sum = Simd::sum(acc);
    for (; i < n; ++i) {
        store_value(x + i, to_float(x[i]) + to_float(more[i]));
        sum += to_float(x[i]) * to_float(x[i]);
    }
    scale_row(x, weight, sum, epsilon, n, y);
}

// One head, in place: x cos + rotate_half(x) sin.
template <class T>
void rotate(T* x, const T* cos, const T* sin, int64_t n) {
    const int64_t half = n / 2;
    int64_t i = 0;
    for (; i + W <= half; i += W) {
        const F a = Simd::load_row(x + i), b = Simd::load_row(x + i + half);
        const F low = rounded<T>(Simd::mul(a, Simd::load_row(cos + i)));
        const F turned = rounded<T>(Simd::mul(b, Simd::load_row(sin + i)));
        const F high = rounded<T>(Simd::mul(b, Simd::load_row(cos + i + half)));
        const F other = rounded<T>(Simd::mul(a, Simd::load_row(sin + i + half)));
        Simd::store_row(x + i, Simd::sub(low, turned));
        Simd::store_row(x + i + half, Simd::add(high, other));
    }
    for (; i < half; ++i) {
        const float a = to_float(x[i]), b = to_float(x[i + half]);
        const float low = rounded<T>(a * to_float(cos[i])) + rounded<T>(-b * to_float(sin[i]));
        const float high = rounded<T>(b * to_float(cos[i + half])) + rounded<T>(a * to_float(sin[i + half]));
        store_value(x + i, low);
        store_value(x + i + half, high);
    }
}

// gate = silu(gate) * up
template <class T>
void gated(T* gate, const T* up, int64_t n) {
    const F one = Simd::set1(1.0f), zero = Simd::set1(0.0f);
    int64_t i = 0;
    for (; i + W <= n; i += W) {
        F g = Simd::load_row(gate + i);
        F e = Simd::exp2(Simd::mul(Simd::abs(g), Simd::set1(-kLog2e)));
        F sigmoid = Simd::div(Simd::less(g, zero, e, one), Simd::add(one, e));
        Simd::store_row(gate + i, Simd::mul(rounded<T>(Simd::mul(g, sigmoid)), Simd::load_row(up + i)));
    }
    for (; i < n; ++i) {
        const float g = to_float(gate[i]);
        store_value(gate + i, rounded<T>(g / (1.0f + std::exp(-g))) * to_float(up[i]));
    }
}

template <class T>
void add_rows(T* x, const T* y, int64_t n) {
    int64_t i = 0;
    for (; i + W <= n; i += W) Simd::store_row(x + i, Simd::add(Simd::load_row(x + i), Simd::load_row(y + i)));
    for (; i < n; ++i) store_value(x + i, to_float(x[i]) + to_float(y[i]));
}

// Calls work(first, last) for parts of `rows` rows of `width` values, on all threads where that is worth it.
template <class Work>
void over_parts(int64_t rows, int64_t width, int threads, Work&& work) {
    constexpr int64_t kPartRows = 8, kLeast = 32768;
    if (rows * width < kLeast) return work(0, rows);
    struct Context {
        int64_t rows;
        Work* work;
    } context{rows, &work};
    parallel_for(
        (rows + kPartRows - 1) / kPartRows, threads,
        [](void* data, int64_t part) {
            const Context& c = *static_cast<const Context*>(data);
            (*c.work)(part * kPartRows, std::min(c.rows, (part + 1) * kPartRows));
        },
        &context, true);
}

template <class T>
void norm_rows(const void* hidden, const void* weight, double epsilon, int64_t rows, int64_t n, int threads, T* y) {
    const T *x = static_cast<const T*>(hidden), *w = static_cast<const T*>(weight);
    over_parts(rows, n, threads, [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) rms_norm<T>(x + r * n, w, epsilon, n, y + r * n);
    });
}

}  // namespace layer
}  // namespace
}  // namespace saccade
