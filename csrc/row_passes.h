// What a layer does to many rows between its matrix products, each in one pass: norms, rotations, gated activations.
// Values are rounded to the storage type where the layer's own modules would round them; see rows.h for a few rows.
#pragma once

#include <utility>

#include "math.h"
#include "threads.h"

namespace saccade {
namespace {

constexpr int64_t kRowTask = 32768;  // values of a task

// x as T stores it.
template <class T>
SACCADE_INLINE F as_stored(F x) {
    if constexpr (sizeof(T) == 4) return x;
    T stored[W];
    Simd::store_row(stored, x);
    return Simd::load_row(stored);
}

// out = x / sqrt(mean(x^2) + eps) * weight; with `other`, x += other first, in place.
template <class T>
void rms_norm_row(const PassCall& c, int64_t i) {
    T* x = static_cast<T*>(c.x) + i * c.x_stride;
    T* out = static_cast<T*>(c.out) + i * c.width;
    const T* weight = static_cast<const T*>(c.weight);
    F squares[4];
    for (F& s : squares) s = Simd::set1(0);
    if (c.other) {
        const T* other = static_cast<const T*>(c.other) + i * c.other_stride;
        for (int64_t k = 0; k < c.width; k += W)
            Simd::store_row(x + k, Simd::add(Simd::load_row(x + k), Simd::load_row(other + k)));
    }
    for (int64_t k = 0; k < c.width; k += W) {
        const F value = Simd::load_row(x + k);
        F& s = squares[k / W & 3];
        s = Simd::fma(value, value, s);
    }
    const float total = Simd::sum(Simd::add(Simd::add(squares[0], squares[1]), Simd::add(squares[2], squares[3])));
    const F scale = Simd::set1(1 / __builtin_sqrtf(total / static_cast<float>(c.width) + c.eps));
    for (int64_t k = 0; k < c.width; k += W)
        Simd::store_row(out + k, Simd::mul(Simd::load_row(weight + k),
                                           as_stored<T>(Simd::mul(Simd::load_row(x + k), scale))));
}

// out = silu(x) * other.
template <class T>
void silu_mul_row(const PassCall& c, int64_t i) {
    const T *x = static_cast<const T*>(c.x) + i * c.x_stride, *up = static_cast<const T*>(c.other) + i * c.other_stride;
    T* out = static_cast<T*>(c.out) + i * c.width;
    const F zero = Simd::set1(0), one = Simd::set1(1), exponent = Simd::set1(-kLog2e);
    for (int64_t k = 0; k < c.width; k += W) {
        const F gate = Simd::load_row(x + k);
        const F e = Simd::exp2(Simd::mul(Simd::abs(gate), exponent));
        const F share = Simd::less(gate, zero, e, one);  // of 1 + e
        const F act = as_stored<T>(Simd::div(Simd::mul(gate, share), Simd::add(one, e)));
        Simd::store_row(out + k, Simd::mul(act, Simd::load_row(up + k)));
    }
}

// Rotates the first `width` channels of every head of a row, in place: x * cos + (-x2, x1) * sin for halves x1, x2.
template <class T>
void rotate_row(const PassCall& c, int64_t i) {
    const T* cos = static_cast<const T*>(c.weight) + i * c.width;
    const T* sin = static_cast<const T*>(c.other) + i * c.width;
    const int64_t half = c.width / 2;
    for (int64_t head = 0; head < c.heads; ++head) {
        T* x = static_cast<T*>(c.x) + head * c.head_stride + i * c.x_stride;
        for (int64_t k = 0; k < half; k += W) {
            const F low = Simd::load_row(x + k), high = Simd::load_row(x + half + k), zero = Simd::set1(0);
            const F turned = as_stored<T>(Simd::mul(Simd::sub(zero, high), Simd::load_row(sin + k)));
            const F other = as_stored<T>(Simd::mul(low, Simd::load_row(sin + half + k)));
            const F a = as_stored<T>(Simd::mul(low, Simd::load_row(cos + k)));
            const F b = as_stored<T>(Simd::mul(high, Simd::load_row(cos + half + k)));
            Simd::store_row(x + k, Simd::add(a, turned));
            Simd::store_row(x + half + k, Simd::add(b, other));
        }
    }
}

// Turns every head of a row, in place (saccade/ops/row_passes.py): its channels times `weight`, then the product with
// Hadamard's matrix of as many channels as the greatest power of two that divides their number. In float32 and in an
// order that is the same for every instruction set.
template <class T>
void turn_row(const PassCall& c, int64_t i) {
    float room[2][kMostTurned];
    const int64_t size = c.width & -c.width, half = size / 2;
    const F root = Simd::set1(static_cast<float>(1 / __builtin_sqrt(static_cast<double>(size))));
    for (int64_t head = 0; head < c.heads; ++head) {
        T* x = static_cast<T*>(c.x) + head * c.head_stride + i * c.x_stride;
        const float* weight = c.weight ? static_cast<const float*>(c.weight) + head * c.width : nullptr;
        float *from = room[0], *to = room[1];
        for (int64_t k = 0; k < c.width; k += W) {
            const F value = Simd::load_row(x + k);
            Simd::store(from + k, weight ? Simd::mul(value, Simd::load(weight + k)) : value);
        }
        for (int64_t step = 1; step < size; step *= 2) {
            for (int64_t first = 0; first < c.width; first += size) {
                const float* a = from + first;
                float *sum = to + first, *rest = sum + half;
                for (int64_t k = 0; k < half; ++k) {
                    sum[k] = a[2 * k] + a[2 * k + 1];
                    rest[k] = a[2 * k] - a[2 * k + 1];
                }
            }
            std::swap(from, to);
        }
        for (int64_t k = 0; k < c.width; k += W) Simd::store_row(x + k, Simd::mul(Simd::load(from + k), root));
    }
}

template <class T>
void pass_typed(const PassCall& call) {
    const int64_t wide = call.width * (call.op == RowPass::rotate || call.op == RowPass::turn ? call.heads : 1);
    struct Job {
        const PassCall& c;
        int64_t each;
    } job{call, wide < kRowTask ? kRowTask / wide : 1};
    parallel_for(
        (call.rows + job.each - 1) / job.each, call.threads,
        [](void* context, int64_t index) {
            const Job& job = *static_cast<Job*>(context);
            const int64_t first = index * job.each, stop = first + job.each;
            for (int64_t i = first; i < stop && i < job.c.rows; ++i) switch (job.c.op) {
                    case RowPass::rms_norm: rms_norm_row<T>(job.c, i); break;
                    case RowPass::silu_mul: silu_mul_row<T>(job.c, i); break;
                    case RowPass::rotate: rotate_row<T>(job.c, i); break;
                    case RowPass::turn: turn_row<T>(job.c, i); break;
                }
        },
        &job);
}

void row_pass(const PassCall& call) {
    if (call.storage == Storage::bf16) pass_typed<uint16_t>(call);
    else pass_typed<float>(call);
}

}  // namespace
}  // namespace saccade
