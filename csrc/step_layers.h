// All layers of a decode step in one call: between a layer's products its rows are attended as decode_step.h says, and
// nothing waits for the interpreter.
#pragma once

#include <chrono>
#include <utility>
#include <vector>

#include "decode_step.h"
#include "layer_calls.h"

namespace saccade {

// A model's layers. Python keeps the weights alive.
struct DecoderLayers {
    std::vector<LayerWeights> layers;

    explicit DecoderLayers(std::vector<LayerWeights> own) : layers(std::move(own)) {
        if (layers.empty()) throw std::invalid_argument("there are no layers");
        const LayerWeights& first = layers[0];
        for (const LayerWeights& one : layers)
            if (one.storage != first.storage || one.channels != first.channels || one.head_dim != first.head_dim ||
                one.query.rows != first.query.rows || one.key.rows != first.key.rows ||
                one.value.rows != first.key.rows || one.output.rows != first.channels)
                throw std::invalid_argument("layers must be of one shape and storage type");
    }
};

// What a layer has of its own in a step; cos and sin [rows, head_dim], or null: it does not rotate. Queries and keys that
// are `turned` (RowPass::turn) are so by floats [heads or kv_heads, head_dim], or null.
struct LayerTurn {
    const void *cos, *sin;
    float scale, softcap;
    bool turned = false;
    const void *query_balance = nullptr, *key_balance = nullptr;
};

// hidden [rows, channels] goes through the layers, in place. The others are what one layer after the other works with:
// q and attended [rows, heads, head_dim], k and v [rows, kv_heads, head_dim], lse [rows, heads].
struct LayersCall {
    int64_t rows;
    void *hidden, *q, *k, *v, *attended;
    float* lse;
    int threads, attending;  // at products, and at attention
};

// Shares of the time that went to attention, and to choosing and learning; of no time if it is not `watched`.
inline std::pair<double, double> run_layers(const KernelSet& set, const DecoderLayers& model, DecodeStep& step,
                                            const Pool& pool, const LayersCall& call,
                                            const std::vector<LayerTurn>& turns, bool watched) {
    const LayerWeights& first = model.layers[0];
    const int64_t layers = static_cast<int64_t>(model.layers.size()), dim = first.head_dim;
    const int64_t heads = first.query.rows / dim, kv_heads = first.key.rows / dim;
    if (step.layers() != layers || static_cast<int64_t>(turns.size()) != layers)
        throw std::invalid_argument("the step must have as many layers as the model");
    if (pool.storage != first.storage || pool.head_dim != dim || pool.kv_heads != kv_heads)
        throw std::invalid_argument("the pool must hold keys and values of the layers' shape and storage type");
    const NewRows fresh{call.k, call.v, dim, kv_heads * dim, call.rows};
    const Output output{call.attended, call.lse, call.rows};
    using Clock = std::chrono::steady_clock;
    Clock::time_point last = watched ? Clock::now() : Clock::time_point();
    double products = 0, attention = 0, choosing = 0;
    const auto lap = [&] {
        const auto now = Clock::now();
        const double seconds = std::chrono::duration<double>(now - last).count();
        last = now;
        return seconds;
    };
    for (int64_t i = 0; i < layers; ++i) {
        const LayerTurn& turn = turns[i];
        set.project_rows(project_call(call.threads, model.layers[i],
                                      {call.rows, call.hidden, turn.cos, turn.sin, call.q, call.k, call.v}));
        if (turn.turned) {
            const auto pass = [&](void* x, int64_t count, const void* balance) {
                set.row_pass({RowPass::turn, first.storage, call.threads, call.rows, dim, count, x, count * dim, dim,
                              nullptr, 0, balance, x, 0});
            };
            pass(call.q, heads, turn.query_balance);
            pass(call.k, kv_heads, turn.key_balance);
        }
        if (watched) products += lap();
        const Queries queries{call.q, dim, heads * dim, heads, call.rows, 0, turn.scale, turn.softcap};
        const double share = step.run(set, call.attending, i, pool, fresh, queries, output, true, true, watched);
        if (watched) {
            const double seconds = lap();
            attention += (1 - share) * seconds;
            choosing += share * seconds;
        }
        set.finish_rows(finish_call(call.threads, model.layers[i], {call.rows, call.hidden, call.attended}));
        if (watched) products += lap();
    }
    const double all = products + attention + choosing;
    return all > 0 ? std::pair<double, double>{attention / all, choosing / all} : std::pair<double, double>{0, 0};
}

}  // namespace saccade
