// All layers of a decode step in one call where some of them keep a state: kernels' calls one after another, over buffers
// of a fixed number of rows, with attention (decode_step.h) among them. Python makes the list (saccade/ops/step_ops.py)
// and keeps the tensors alive.
#pragma once

#include <chrono>
#include <cmath>
#include <utility>
#include <variant>
#include <vector>

#include "decode_step.h"
#include "half.h"
#include "keeping_kernels.h"
#include "kernels.h"
#include "row_calls.h"

namespace saccade {

// What is done value by value over rows of `width`: row i of x begins i * x_stride values after it, and so on.
enum class Mixing : int { add = 0, times = 1, times_sigmoid = 2, rates = 3, decays = 4 };

// add: out = x + y; times: out = x y; times_sigmoid: out = x sigmoid(y), the factor rounded first; rates: out = sigmoid(x),
// rounded, as a float; decays: out = -exp(log[j]) softplus(x + bias[j]), a float, of floats log and bias [width].
struct MixCall {
    Mixing kind;
    Storage storage;
    int threads;
    int64_t rows, width;
    const void* x;
    int64_t x_stride;
    const void* y;
    int64_t y_stride;
    const float *log, *bias;
    void* out;
    int64_t out_stride;
};

// Layer `layer` of those that attend: q and out [rows, heads, head_dim], k and v [rows, kv_heads, head_dim].
struct AttendCall {
    int64_t layer, rows, heads, kv_heads, head_dim;
    const void *q, *k, *v;
    void* out;
    float* lse;  // [rows, heads]
    float scale, softcap;
};

inline float mixed_value(float x) { return x; }
inline float mixed_value(uint16_t x) { return from_half(x); }
inline void mix_into(float* to, float x) { *to = x; }
inline void mix_into(uint16_t* to, float x) { *to = to_half(x); }

template <class T>
float stored(float x) {
    T kept;
    mix_into(&kept, x);
    return mixed_value(kept);
}

template <class T>
void mix_row(const MixCall& c, int64_t row) {
    const T* x = static_cast<const T*>(c.x) + row * c.x_stride;
    const T* y = c.y ? static_cast<const T*>(c.y) + row * c.y_stride : nullptr;
    const auto sigmoid = [](float value) { return 1.0f / (1.0f + std::exp(-value)); };
    if (c.kind == Mixing::rates || c.kind == Mixing::decays) {
        float* out = static_cast<float*>(c.out) + row * c.out_stride;
        for (int64_t i = 0; i < c.width; ++i) {
            const float value = mixed_value(x[i]);
            if (c.kind == Mixing::rates) {
                out[i] = stored<T>(sigmoid(value));
            } else {
                const float sum = value + c.bias[i];
                out[i] = -std::exp(c.log[i]) * (sum > 20.0f ? sum : std::log1p(std::exp(sum)));
            }
        }
        return;
    }
    T* out = static_cast<T*>(c.out) + row * c.out_stride;
    if (c.kind == Mixing::add)
        for (int64_t i = 0; i < c.width; ++i) mix_into(out + i, mixed_value(x[i]) + mixed_value(y[i]));
    else if (c.kind == Mixing::times)
        for (int64_t i = 0; i < c.width; ++i) mix_into(out + i, mixed_value(x[i]) * mixed_value(y[i]));
    else
        for (int64_t i = 0; i < c.width; ++i)
            mix_into(out + i, mixed_value(x[i]) * stored<T>(sigmoid(mixed_value(y[i]))));
}

inline void mix(const MixCall& call) {
    constexpr int64_t kPiece = 1 << 13;  // values of a thread
    parallel_for(
        call.rows, worth(call.rows * call.width, kPiece, call.threads),
        [](void* context, int64_t row) {
            const MixCall& c = *static_cast<const MixCall*>(context);
            if (c.storage == Storage::bf16) mix_row<uint16_t>(c, row);
            else mix_row<float>(c, row);
        },
        const_cast<MixCall*>(&call));
}

class StepOps {
  public:
    template <class Call>
    void add(const Call& call) {
        ops_.push_back(call);
    }

    int64_t size() const { return static_cast<int64_t>(ops_.size()); }

    // Shares of the time that went to attention, and to choosing and learning; of no time if it is not `watched`.
    std::pair<double, double> run(const KernelSet& set, DecodeStep& step, const Pool& pool, int attending, bool watched) {
        for (const Op& op : ops_) {  // before any state is changed
            if (const auto* conv = std::get_if<CausalConv>(&op)) check(conv->states, conv->sequences);
            if (const auto* rule = std::get_if<DeltaRule>(&op)) check(rule->states, rule->sequences);
            if (const auto* one = std::get_if<AttendCall>(&op))
                if (one->layer >= step.layers() || pool.head_dim != one->head_dim || pool.kv_heads != one->kv_heads)
                    throw std::invalid_argument("the step and the pool must be of the layers' shape");
        }
        using Clock = std::chrono::steady_clock;
        const Clock::time_point began = watched ? Clock::now() : Clock::time_point();
        const auto since = [](Clock::time_point from) {
            return std::chrono::duration<double>(Clock::now() - from).count();
        };
        double attention = 0, choosing = 0;
        for (const Op& op : ops_) {
            const auto* one = std::get_if<AttendCall>(&op);
            if (!one) {
                std::visit([&](const auto& call) { run_op(set, call); }, op);
                continue;
            }
            const Clock::time_point from = watched ? Clock::now() : Clock::time_point();
            const int64_t dim = one->head_dim;
            const NewRows fresh{one->k, one->v, dim, one->kv_heads * dim, one->rows};
            const Output output{one->out, one->lse, one->rows};
            const Queries queries{one->q, dim, one->heads * dim, one->heads, one->rows, 0, one->scale, one->softcap};
            const double share = step.run(set, attending, one->layer, pool, fresh, queries, output, true, true, watched);
            if (watched) {
                const double seconds = since(from);
                attention += (1 - share) * seconds;
                choosing += share * seconds;
            }
        }
        const double all = watched ? since(began) : 0;
        return all > 0 ? std::pair<double, double>{attention / all, choosing / all} : std::pair<double, double>{0, 0};
    }

    // A list without attention.
    void run(const KernelSet& set) const {
        for (const Op& op : ops_)
            if (std::holds_alternative<AttendCall>(op)) throw std::invalid_argument("attention needs a step");
        for (const Op& op : ops_) std::visit([&](const auto& call) { run_op(set, call); }, op);
    }

  private:
    using Op = std::variant<ProductRows, NormRows, PassCall, CausalConv, DeltaRule, MixCall, AttendCall>;

    static void check(const StateSlots& states, int64_t sequences) {
        for (int64_t s = 0; s < sequences; ++s)
            if (states.slots[s] < 0 || states.slots[s] >= states.count)
                throw std::invalid_argument("slot " + std::to_string(states.slots[s]) + " is none of the " +
                                            std::to_string(states.count) + " of the pool");
    }

    static void run_op(const KernelSet& set, const ProductRows& call) { set.product_rows(call); }
    static void run_op(const KernelSet& set, const NormRows& call) { set.keeping->norm_rows(call); }
    static void run_op(const KernelSet& set, const PassCall& call) { set.row_pass(call); }
    static void run_op(const KernelSet& set, const CausalConv& call) { set.keeping->causal_conv(call); }
    static void run_op(const KernelSet& set, const DeltaRule& call) { set.keeping->delta_rule(call); }
    static void run_op(const KernelSet&, const MixCall& call) { mix(call); }
    static void run_op(const KernelSet&, const AttendCall&) {}

    std::vector<Op> ops_;
};

}  // namespace saccade
