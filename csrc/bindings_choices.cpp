// Decode rows whose blocks are chosen by summaries and read in the same call: saccade/ops/cpu_plans.py keeps the tensors
// alive. It puts together what rank_blocks, decode and progressive do for one row.
#include <nanobind/stl/vector.h>

#include <memory>
#include <vector>

#include "bindings.h"
#include "threads.h"

namespace nb = nanobind;

namespace saccade {
namespace {

// What a row reads (saccade/selection/plan.py, BestBlocks and RankedBlocks): the `first` first and `last` last blocks,
// and of the others the `take` best, or with a microbatch as many by rank as the stopping rule lets in.
struct BlockChoice {
    int64_t size, units, parts, first, last, take = 0;
    int64_t microbatch = 0;  // 0: no rule
    double epsilon = 1;
    bool least = false, mean = false;
};

// One row of a call; its summaries are [blocks, parts, kv_heads, head_dim] of the pool's storage type. Under a rule,
// `used` and `coverage` [units] get the ranked blocks that were read and the rule's estimate at the end.
struct ChoosingRow : BlockTable {
    int64_t row, q_start;
    BlockChoice choice;
    const void* summary;
    int64_t summarized;  // blocks
    int64_t* used;
    float* coverage;
};

// A row's work, and room for its lists.
struct Choosing {
    Attention a;
    const ChoosingRow* row;
    int64_t first, stop, ends;  // blocks that are ranked, and how many follow them
    std::vector<int32_t> lists, order, read;
    std::vector<int64_t> offsets;

    Choosing(const Attention& attention, const ChoosingRow& from) : a(attention), row(&from) {
        const BlockChoice& c = from.choice;
        check_units(a, c.units);
        const int64_t keys = a.q_start + 1, full = keys / c.size, partial = keys % c.size > 0;
        first = c.first;
        stop = (c.microbatch ? full : full + partial) - c.last;
        ends = c.microbatch ? c.last + partial : c.last;
        const int64_t ranked = stop - first;
        if (ranked < 1 || (!c.microbatch && c.take > ranked))
            throw std::invalid_argument("a row of " + std::to_string(keys) + " keys has too few blocks to choose from");
        if (from.summarized < stop && (c.microbatch || (c.take && c.take < ranked)))
            throw std::invalid_argument("summaries of " + std::to_string(from.summarized) + " blocks do not reach " +
                                        std::to_string(stop));
        if (c.microbatch && (!from.used || !from.coverage))
            throw std::invalid_argument("a rule needs used and coverage");
        const int64_t forced = first + ends;
        lists.resize(c.units * (forced + (c.microbatch ? 0 : c.take)));
        order.resize(c.units * (c.microbatch ? ranked : c.take));
        offsets.resize(c.units + 1);
        if (c.microbatch) read.resize(c.units * (forced + ranked) + 1);
    }

    BlockRanking ranking() const {
        const BlockChoice& c = row->choice;
        BlockRanking r{};
        r.storage = r.summary_storage = a.storage;
        r.q = a.q;
        r.q_head_stride = a.q_head_stride;
        r.summary = row->summary;
        r.heads = a.heads;
        r.kv_heads = a.kv_heads;
        r.head_dim = a.head_dim;
        r.units = c.units;
        r.parts = c.parts;
        r.first = first;
        r.last = stop;
        r.count = c.microbatch ? 0 : c.take;
        r.out = const_cast<int32_t*>(order.data());
        r.threads = a.threads;
        return r;
    }

    void run(const KernelSet& set) {
        const BlockChoice& c = row->choice;
        const int64_t ranked = stop - first;
        if (c.microbatch || (c.take && c.take < ranked)) {
            set.rank_blocks(ranking());
        } else {
            for (int64_t i = 0; i < c.units * c.take; ++i) order[i] = static_cast<int32_t>(first + i % c.take);
        }
        c.microbatch ? run_ruled(set) : run_listed(set);
    }

  private:
    void run_listed(const KernelSet& set) {
        const BlockChoice& c = row->choice;
        int32_t* to = lists.data();
        for (int64_t u = 0; u < c.units; ++u) {
            offsets[u] = to - lists.data();
            for (int64_t b = 0; b < first; ++b) *to++ = static_cast<int32_t>(b);
            for (int64_t i = 0; i < c.take; ++i) *to++ = order[u * c.take + i];
            for (int64_t b = 0; b < ends; ++b) *to++ = static_cast<int32_t>(stop + b);
        }
        offsets[c.units] = to - lists.data();
        a.keys = Keys::blocks;
        a.block_size = c.size;
        a.units = c.units;
        a.q_blocks = 1;
        a.offsets = offsets.data();
        a.indices = lists.data();
        set.decode(a);
    }

    void run_ruled(const KernelSet& set) {
        const BlockChoice& c = row->choice;
        const int64_t forced = first + ends;
        for (int64_t i = 0; i < c.units * forced; ++i) {
            const int64_t at = i % forced;
            lists[i] = static_cast<int32_t>(at < first ? at : stop + at - first);
        }
        Progressive p{};
        p.attention = a;
        p.attention.keys = Keys::blocks;
        p.block_size = p.attention.block_size = c.size;
        p.units = p.attention.units = c.units;
        p.always_count = forced;
        p.ranked = stop - first;
        p.microbatch = c.microbatch;
        p.always = lists.data();
        p.order = order.data();
        p.epsilon = c.epsilon;
        p.least = c.least;
        p.mean = c.mean;
        p.used = row->used;
        p.coverage = row->coverage;
        p.offsets = offsets.data();
        p.indices = read.data();
        set.progressive(p);
    }
};

// Rows of several sequences in one pool: `queries` and `output` hold the rows of all of them, the latter as [rows,
// heads, head_dim] and [rows, heads].
void choose_rows(const KernelSet& set, int threads, const Pool& pool, const Queries& queries,
                 const std::vector<ChoosingRow>& calls, const Output& output) {
    struct Rows {
        const KernelSet& set;
        std::vector<Choosing> some;
    } rows{set, {}};
    rows.some.reserve(calls.size());
    for (const ChoosingRow& call : calls)
        rows.some.emplace_back(row_of(threads, pool, queries, call, call.row, call.q_start, output), call);
    nb::gil_scoped_release release;
    const int64_t count = static_cast<int64_t>(rows.some.size());
    if (count < threads) {  // a result does not depend on how many threads made it
        for (Choosing& one : rows.some) one.run(set);
        return;
    }
    for (Choosing& one : rows.some) one.a.threads = 1;
    parallel_for(
        count, threads,
        [](void* context, int64_t i) {
            Rows& all = *static_cast<Rows*>(context);
            all.some[i].run(all.set);
        },
        &rows);
}

}  // namespace

void bind_choices(nb::module_& m, KernelSetClass& set) {
    bind_struct<BlockChoice>(
        m, "BlockChoice",
        {field<&BlockChoice::size>("size").at_least(1), field<&BlockChoice::units>("units").at_least(1),
         field<&BlockChoice::parts>("parts").within(1, 2), field<&BlockChoice::first>("first"),
         field<&BlockChoice::last>("last").at_least(1), field<&BlockChoice::take>("take").optional(),
         field<&BlockChoice::microbatch>("microbatch").optional(), field<&BlockChoice::epsilon>("epsilon").optional(),
         field<&BlockChoice::least>("least").optional(), field<&BlockChoice::mean>("mean").optional()});
    bind_struct<ChoosingRow>(
        m, "ChoosingRow",
        {field<&ChoosingRow::row>("row"), field<&ChoosingRow::q_start>("q_start"),
         field<&ChoosingRow::table, ChoosingRow>("slots"),
         field<&ChoosingRow::table_head_stride, ChoosingRow>("head_stride"),
         field<&ChoosingRow::table_blocks, ChoosingRow>("blocks").at_least(1), field<&ChoosingRow::choice>("choice"),
         field<&ChoosingRow::summary>("summary").or_null(), field<&ChoosingRow::summarized>("summarized"),
         field<&ChoosingRow::used>("used").optional(), field<&ChoosingRow::coverage>("coverage").optional()},
        [](const ChoosingRow& row) { check_table(row); });
    set.def("choose_rows", &choose_rows);
}

}  // namespace saccade
