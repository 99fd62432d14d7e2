// A decoder layer's calls on a few rows, made of what stays the same from step to step and what a step hands over.
#pragma once

#include "bindings.h"

namespace saccade {

struct LayerWeights {
    Storage storage;
    int64_t channels, head_dim;
    const void *norm, *query_norm, *key_norm, *second_norm;
    double epsilon, head_epsilon, second_epsilon;
    RowMatrix query, key, value, output, gate, up, down;
};

// See ProjectRows and FinishRows.
struct LayerInput {
    int64_t rows;
    const void *hidden, *cos, *sin;
    void *q, *k, *v;
};

struct LayerUpdate {
    int64_t rows;
    void* hidden;
    const void* attended;
};

inline ProjectRows project_call(int threads, const LayerWeights& w, const LayerInput& in) {
    return {w.storage,
            threads,
            in.rows,
            w.channels,
            w.head_dim,
            in.hidden,
            w.norm,
            w.epsilon,
            w.head_epsilon,
            {w.query, w.key, w.value},
            {w.query_norm, w.key_norm},
            in.cos,
            in.sin,
            {in.q, in.k, in.v}};
}

inline FinishRows finish_call(int threads, const LayerWeights& w, const LayerUpdate& in) {
    return {w.storage,
            threads,
            in.rows,
            w.channels,
            w.query.rows,
            in.hidden,
            in.attended,
            w.second_norm,
            w.second_epsilon,
            w.output,
            w.gate,
            w.up,
            w.down};
}

}  // namespace saccade
