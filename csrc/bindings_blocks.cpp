// Blocks by their summaries, keys by labels and by hash codes: the Python side keeps the tensors alive.
#include "bindings.h"

namespace nb = nanobind;

namespace saccade {
namespace {

void check_codes(const BlockCodes& c) {
    if (c.blocks > c.tiles * 16 || c.blocks % 16)
        throw std::invalid_argument("blocks must be a multiple of 16 that tiles have room for");
}

void check_ranking(const BlockRanking& r) {
    if (r.heads % r.units || (r.units % r.kv_heads && r.kv_heads % r.units) || r.heads % r.kv_heads)
        throw std::invalid_argument("heads, units and kv_heads do not fit each other");
    if (r.first >= r.last || r.count > r.last - r.first)
        throw std::invalid_argument("count must lie within the blocks from first to last");
}

void check_estimates(const BlockEstimates& e) {
    if (e.heads % e.kv_heads) throw std::invalid_argument("heads must be a multiple of kv_heads");
    if (e.first > e.last) throw std::invalid_argument("first must not lie behind last");
}

void check_labels(const LabelScores& c) {
    if (!c.scores && !c.weights && !c.best) throw std::invalid_argument("scores, weights or best must be an address");
    if (c.weights && (c.block < 8 || c.block > 1024 || (c.block & (c.block - 1))))
        throw std::invalid_argument("block=" + std::to_string(c.block) + " must be a power of two from 8 to 1024");
    if (c.weights && (c.first >= c.last || c.last * c.block > c.length))
        throw std::invalid_argument("the blocks from first to last must rise and lie within length");
    if (c.best && (c.first > c.last || c.last > c.length || c.count > c.last - c.first))
        throw std::invalid_argument("count must lie within the keys from first to last, and these within length");
}

void rank_blocks(const KernelSet& set, const BlockRanking& call) { run(set.rank_blocks, call); }
void block_estimates(const KernelSet& set, const BlockEstimates& call) { run(set.block_estimates, call); }
void rank_estimates(const KernelSet& set, const EstimateRanking& call) { run(set.rank_estimates, call); }
void label_scores(const KernelSet& set, const LabelScores& call) { run(set.label_scores, call); }
void fill_buckets(const KernelSet& set, const HashBuckets& call) { run(set.fill_buckets, call); }

void label_keys(const KernelSet& set, const Pool& pool, const BlockTable& table, const LabelKeys& labels) {
    if (labels.last > table.table_blocks * pool.page || labels.first > labels.last)
        throw std::invalid_argument("first and last must rise and lie within the block table");
    LabelKeys call = labels;
    static_cast<Pool&>(call.kv) = pool;
    static_cast<BlockTable&>(call.kv) = table;
    run(set.label_keys, call);
}

}  // namespace

void bind_blocks(nb::module_& m, KernelSetClass& set) {
    bind_struct<BlockCodes>(m, "BlockCodes",
                            {field<&BlockCodes::codes>("codes"), field<&BlockCodes::range>("range"),
                             field<&BlockCodes::frame>("frame"), field<&BlockCodes::tiles>("tiles").at_least(1),
                             field<&BlockCodes::blocks>("blocks").at_least(16)},
                            &check_codes);
    bind_struct<BlockRanking>(
        m, "BlockRanking",
        {field<&BlockRanking::threads>("threads").at_least(1), field<&BlockRanking::storage>("storage").within(0, 1),
         field<&BlockRanking::summary_storage>("summary_storage").within(0, 1), field<&BlockRanking::q>("q"),
         field<&BlockRanking::q_head_stride>("head_stride"), field<&BlockRanking::summary>("summary").or_null(),
         field<&BlockRanking::tail>("tail").optional(), field<&BlockRanking::heads>("heads").at_least(1),
         field<&BlockRanking::kv_heads>("kv_heads").at_least(1),
         field<&BlockRanking::head_dim>("head_dim").at_least(16),
         field<&BlockRanking::units>("units").at_least(1), field<&BlockRanking::parts>("parts").within(1, 2),
         field<&BlockRanking::first>("first"), field<&BlockRanking::last>("last"), field<&BlockRanking::count>("count"),
         field<&BlockRanking::out>("out"), field<&BlockRanking::falling>("falling").optional(),
         field<&BlockRanking::coded>("coded").optional()},
        &check_ranking);
    bind_struct<BlockEstimates>(
        m, "BlockEstimates",
        {field<&BlockEstimates::threads>("threads").at_least(1),
         field<&BlockEstimates::storage>("storage").within(0, 1),
         field<&BlockEstimates::summary_storage>("summary_storage").within(0, 1), field<&BlockEstimates::q>("q"),
         field<&BlockEstimates::q_head_stride>("head_stride"), field<&BlockEstimates::summary>("summary").or_null(),
         field<&BlockEstimates::heads>("heads").at_least(1), field<&BlockEstimates::kv_heads>("kv_heads").at_least(1),
         field<&BlockEstimates::head_dim>("head_dim").at_least(16), field<&BlockEstimates::first>("first"),
         field<&BlockEstimates::last>("last"), field<&BlockEstimates::scale>("scale"),
         field<&BlockEstimates::log_size>("log_size"), field<&BlockEstimates::out>("out").or_null()},
        &check_estimates);
    bind_struct<EstimateRanking>(
        m, "EstimateRanking",
        {field<&EstimateRanking::threads>("threads").at_least(1), field<&EstimateRanking::estimates>("estimates"),
         field<&EstimateRanking::heads>("heads").at_least(1), field<&EstimateRanking::units>("units").at_least(1),
         field<&EstimateRanking::blocks>("blocks").at_least(1),
         field<&EstimateRanking::first>("first").optional(), field<&EstimateRanking::order>("order"),
         field<&EstimateRanking::sorted>("ranked")},
        [](const EstimateRanking& r) {
            if (r.heads % r.units) throw std::invalid_argument("heads must be a multiple of units");
        });
    bind_struct<LabelScores>(
        m, "LabelScores",
        {field<&LabelScores::threads>("threads").at_least(1), field<&LabelScores::q>("q"),
         field<&LabelScores::kv_heads>("kv_heads").at_least(1), field<&LabelScores::rows>("rows").at_least(1),
         field<&LabelScores::channels>("channels").at_least(1), field<&LabelScores::tiles>("tiles"),
         field<&LabelScores::length>("length"), field<&LabelScores::packed>("packed"),
         field<&LabelScores::codes>("codes"), field<&LabelScores::range>("range"),
         field<&LabelScores::scores>("scores").optional(), field<&LabelScores::weights>("weights").optional(),
         field<&LabelScores::block>("block").optional(), field<&LabelScores::scale>("scale").optional(),
         field<&LabelScores::cap>("cap").optional(), field<&LabelScores::added>("added").optional(),
         field<&LabelScores::first>("first").optional(),
         field<&LabelScores::last>("last").optional(), field<&LabelScores::count>("count").optional(),
         field<&LabelScores::best>("best").optional()},
        &check_labels);
    bind_struct<LabelKeys>(
        m, "LabelKeys",
        {field<&LabelKeys::threads>("threads").at_least(1), field<&LabelKeys::channel>("channel"),
         field<&LabelKeys::channels>("channels").at_least(1), field<&LabelKeys::bits>("bits").within(1, 8),
         field<&LabelKeys::tiles>("tiles"), field<&LabelKeys::first>("first"), field<&LabelKeys::last>("last"),
         field<&LabelKeys::codes>("codes"), field<&LabelKeys::range>("range"),
         field<&LabelKeys::frame>("frame").optional()});
    bind_struct<HashBuckets>(
        m, "HashBuckets",
        {field<&HashBuckets::threads>("threads").at_least(1), field<&HashBuckets::rows>("rows").at_least(1),
         field<&HashBuckets::keys>("keys"), field<&HashBuckets::buckets>("buckets").at_least(1),
         field<&HashBuckets::codes>("codes").or_null(), field<&HashBuckets::starts>("starts"),
         field<&HashBuckets::order>("order").or_null()});
    set.def("rank_blocks", &rank_blocks);
    set.def("block_estimates", &block_estimates);
    set.def("rank_estimates", &rank_estimates);
    set.def("label_scores", &label_scores);
    set.def("label_keys", &label_keys);
    set.def("fill_buckets", &fill_buckets);
}

}  // namespace saccade
