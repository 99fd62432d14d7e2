#include "kernels.h"
#include "simd_avx512_bf16.h"
// clang-format off: the kernels see the Simd above
#include "antidiagonal.h"
#include "decode.h"
#include "few_rows.h"
#include "gather.h"
#include "line_cover.h"
#include "line_groups.h"
#include "prefill.h"
#include "progressive.h"
#include "row_shares.h"
#include "rows.h"

#include <sys/syscall.h>
#include <unistd.h>

namespace saccade {
namespace {

// What tiles multiply: bf16 in whole tiles of channels. Everything else is the vector kernels'.
bool serves(const Attention& a) { return a.storage == Storage::bf16 && a.head_dim % kTileKeys == 0; }

void prefill(const Attention& a) {
    if (serves(a)) prefill_typed<TileMath, uint16_t>(a);
    else avx512_bf16_kernels.prefill(a);
}

void few_rows(const FewRows& f) {
    if (serves(f.attention)) few_rows_typed<TileMath, uint16_t>(f);
    else avx512_bf16_kernels.few_rows(f);
}

void line_sums(const LineSums& s) {
    if (serves(s.attention)) line_sums_typed<TileMath, uint16_t>(s);
    else avx512_bf16_kernels.line_sums(s);
}

void line_groups(const LineGroups& s) {
    if (serves(s.attention)) line_groups_typed<TileMath, uint16_t>(s);
    else avx512_bf16_kernels.line_groups(s);
}

void cover_rows(const RowCovers& s) {
    if (serves(s.attention)) cover_rows_typed<TileMath, uint16_t>(s);
    else avx512_bf16_kernels.cover_rows(s);
}

void antidiagonals(const Antidiagonals& s) {
    if (serves(s.attention)) antidiagonals_typed<TileMath, uint16_t>(s);
    else avx512_bf16_kernels.antidiagonals(s);
}

void row_shares(const RowShares& s) {
    if (serves(s.attention)) row_shares_typed<TileMath, uint16_t>(s);
    else avx512_bf16_kernels.row_shares(s);
}

// Of one row per head: processors with tiles take four times as long for a product of bf16 pairs as for one of fp32.
// Tiles were tried: over keys in the caches they are faster, but they keep memory less busy.
void decode(const Attention& a) {
    if (serves(a)) decode_typed<WordMath, uint16_t, TileMath>(a);
    else if (a.storage == Storage::bf16) decode_typed<WordMath, uint16_t>(a);
    else avx512_bf16_kernels.decode(a);
}

void progressive(const Progressive& p) {
    if (p.attention.storage == Storage::bf16) progressive_typed<WordMath, uint16_t>(p);
    else avx512_bf16_kernels.progressive(p);
}

void gather(const Gather& g) {
    if (g.attention.storage == Storage::bf16) gather_typed<WordMath, uint16_t>(g);
    else avx512_bf16_kernels.gather(g);
}

const PlaneKernels& own_planes() { return avx512_bf16_planes; }

bool serves(Storage storage, int64_t rows) { return storage == Storage::bf16 && rows >= layer::kTileRows; }

void project_rows(const ProjectRows& c) {
    if (serves(c.storage, c.rows)) layer::project_rows_typed<uint16_t, true>(c);
    else avx512_bf16_kernels.project_rows(c);
}

void finish_rows(const FinishRows& c) {
    if (serves(c.storage, c.rows)) layer::finish_rows_typed<uint16_t, true>(c);
    else avx512_bf16_kernels.finish_rows(c);
}

void head_rows(const HeadRows& c) {
    if (serves(c.storage, c.rows)) layer::head_rows_typed<uint16_t, true>(c);
    else avx512_bf16_kernels.head_rows(c);
}

void product_rows(const ProductRows& c) {
    if (serves(c.storage, c.rows)) layer::product_rows_typed<uint16_t, true>(c);
    else avx512_bf16_kernels.product_rows(c);
}

}  // namespace

// The operating system keeps no tile registers for a process that has not asked for them.
bool ask_for_tiles() {
    constexpr int kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
    return syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
}

const KernelSet& amx_bf16_kernels() {
    static const KernelSet set = [] {
        KernelSet made = avx512_bf16_kernels;
        made.name = "amx_bf16";
        made.prefill = prefill;
        made.line_sums = line_sums;
        made.line_groups = line_groups;
        made.cover_rows = cover_rows;
        made.antidiagonals = antidiagonals;
        made.row_shares = row_shares;
        made.decode = decode;
        made.few_rows = few_rows;
        made.progressive = progressive;
        made.gather = gather;
        made.project_rows = project_rows;
        made.finish_rows = finish_rows;
        made.head_rows = head_rows;
        made.product_rows = product_rows;
        made.many_rows = many_rows_of_tiles;
        return made;
    }();
    return set;
}

}  // namespace saccade
