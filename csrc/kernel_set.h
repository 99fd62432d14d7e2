// Instantiates the kernels for the Simd of this translation unit. Included last, by each kernels_*.cpp.
#pragma once

#include "antidiagonal.h"
#include "block_codes.h"
#include "block_estimates.h"
#include "decode.h"
#include "few_rows.h"
#include "gather.h"
#include "group_truth.h"
#include "label_keys.h"
#include "line_cover.h"
#include "line_groups.h"
#include "prefill.h"
#include "probes.h"
#include "progressive.h"
#include "sampled.h"
#include "rows.h"
#include "row_passes.h"
#include "row_shares.h"
#include "score_tables.h"

namespace saccade {
namespace {

void prefill(const Attention& a) {
    if (a.storage == Storage::bf16) prefill_typed<HalfMath, uint16_t>(a);
    else prefill_typed<Fp32Math, float>(a);
}

void decode(const Attention& a) {
    if (a.storage == Storage::bf16) decode_typed<HalfMath, uint16_t>(a);
    else decode_typed<Fp32Math, float>(a);
}

void few_rows(const FewRows& f) {
    if (f.attention.storage == Storage::bf16) few_rows_typed<HalfMath, uint16_t>(f);
    else few_rows_typed<Fp32Math, float>(f);
}

void group_truth(const GroupTruth& c) {
    if (c.attention.storage == Storage::bf16) group_truth_typed<uint16_t>(c);
    else group_truth_typed<float>(c);
}

void line_sums(const LineSums& s) {
    if (s.attention.storage == Storage::bf16) line_sums_typed<HalfMath, uint16_t>(s);
    else line_sums_typed<Fp32Math, float>(s);
}

void line_groups(const LineGroups& s) {
    if (s.attention.storage == Storage::bf16) line_groups_typed<HalfMath, uint16_t>(s);
    else line_groups_typed<Fp32Math, float>(s);
}

void pooled_shares(const PooledShares& s) {
    if (s.attention.storage == Storage::bf16) pooled_shares_typed<uint16_t>(s);
    else pooled_shares_typed<float>(s);
}

void cover_rows(const RowCovers& s) {
    if (s.attention.storage == Storage::bf16) cover_rows_typed<HalfMath, uint16_t>(s);
    else cover_rows_typed<Fp32Math, float>(s);
}

void antidiagonals(const Antidiagonals& s) {
    if (s.attention.storage == Storage::bf16) antidiagonals_typed<HalfMath, uint16_t>(s);
    else antidiagonals_typed<Fp32Math, float>(s);
}

void row_shares(const RowShares& s) {
    if (s.attention.storage == Storage::bf16) row_shares_typed<HalfMath, uint16_t>(s);
    else row_shares_typed<Fp32Math, float>(s);
}

void gather(const Gather& g) {
    if (g.attention.storage == Storage::bf16) gather_typed<HalfMath, uint16_t>(g);
    else gather_typed<Fp32Math, float>(g);
}

void progressive(const Progressive& p) {
    if (p.attention.storage == Storage::bf16) progressive_typed<HalfMath, uint16_t>(p);
    else progressive_typed<Fp32Math, float>(p);
}

void draw(const HashDraw& c) {
    if (c.attention.storage == Storage::bf16) draw_typed<uint16_t>(c);
    else draw_typed<float>(c);
}

void sampled(const SampledCall& c) {
    if (c.attention.storage == Storage::bf16) sampled_typed<HalfMath, uint16_t>(c);
    else sampled_typed<Fp32Math, float>(c);
}

void block_estimates(const BlockEstimates& e) {
    if (e.storage == Storage::bf16) {
        if (e.summary_storage == Storage::bf16) block_estimates_typed<uint16_t, uint16_t>(e);
        else block_estimates_typed<uint16_t, float>(e);
    } else {
        if (e.summary_storage == Storage::bf16) block_estimates_typed<float, uint16_t>(e);
        else block_estimates_typed<float, float>(e);
    }
}

void rank_blocks(const BlockRanking& r) {
    if (r.storage == Storage::bf16) {
        if (r.summary_storage == Storage::bf16) rank_blocks_typed<uint16_t, uint16_t>(r);
        else rank_blocks_typed<uint16_t, float>(r);
    } else {
        if (r.summary_storage == Storage::bf16) rank_blocks_typed<float, uint16_t>(r);
        else rank_blocks_typed<float, float>(r);
    }
}

void sink_share(const SinkShare& c) {
    if (c.attention.storage == Storage::bf16) sink_share_typed<uint16_t>(c);
    else sink_share_typed<float>(c);
}

void probe(const Probes& c) {
    if (c.attention.storage == Storage::bf16) probe_typed<uint16_t>(c);
    else probe_typed<float>(c);
}

double cover(const CoverCall& call) {
    Cover c{call.weights, call.count, call.keys, call.first, call.count, call.positions, call.share};
    c.columns = call.columns;
    c.distances = call.distances;
    c.run();
    call.counts[0] = c.column_count;
    call.counts[1] = c.distance_count;
    return c.recovered;
}

void project_rows(const ProjectRows& c) {
    if (c.storage == Storage::bf16) layer::project_rows_typed<uint16_t>(c);
    else layer::project_rows_typed<float>(c);
}

void finish_rows(const FinishRows& c) {
    if (c.storage == Storage::bf16) layer::finish_rows_typed<uint16_t>(c);
    else layer::finish_rows_typed<float>(c);
}

void head_rows(const HeadRows& c) {
    if (c.storage == Storage::bf16) layer::head_rows_typed<uint16_t>(c);
    else layer::head_rows_typed<float>(c);
}

void product_rows(const ProductRows& c) {
    if (c.storage == Storage::bf16) layer::product_rows_typed<uint16_t>(c);
    else layer::product_rows_typed<float>(c);
}

void plane_rows(const PlaneRows& c) { own_planes().rows(c); }

float read_pass(const void* data, int64_t bytes) {
    const float* p = static_cast<const float*>(data);
    F acc[8];
    for (F& x : acc) x = Simd::set1(0);
    const int64_t count = bytes / static_cast<int64_t>(sizeof(float));
    for (int64_t i = 0; i < count; i += 8 * W) {
        for (int64_t line = 0; line < 8 * W; line += 16) Simd::prefetch(p + i + line + 2048);
        for (int j = 0; j < 8; ++j) acc[j] = Simd::max(acc[j], Simd::load(p + i + j * W));
    }
    float total = 0;
    for (F x : acc) total += Simd::sum(x);
    return total;
}

}  // namespace
}  // namespace saccade
