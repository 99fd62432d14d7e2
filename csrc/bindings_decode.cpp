// Decode over lists, and LFPS's tables: the Python side keeps the tensors alive.
#include "bindings.h"

namespace nb = nanobind;

namespace saccade {
namespace {

// The call of one row.
Attention decode_row(int threads, const Pool& pool, const BlockTable& table, const Queries& queries) {
    if (queries.q_len != 1) throw std::invalid_argument("q_len=" + std::to_string(queries.q_len) + " must be 1");
    return attention(threads, pool, table, queries);
}

// Throws std::invalid_argument unless each list belongs to one KV head.
void check_lists(const Attention& a, int64_t units) {
    check_units(a, units);
    if (units % a.kv_heads)
        throw std::invalid_argument("units=" + std::to_string(units) + " must be a multiple of " +
                                    std::to_string(a.kv_heads) + " KV heads");
}

void gather(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
            const Gather& lists, const Output& output) {
    Gather call = lists;
    call.attention = decode_row(threads, pool, table, queries);
    write_to(call.attention, output);
    check_lists(call.attention, call.units);
    if (call.keys > table.table_blocks * pool.page || call.sinks + call.local > call.keys)
        throw std::invalid_argument("keys=" + std::to_string(call.keys) +
                                    " do not fit the block table or what is forced");
    if (call.lists != call.units && call.lists != queries.heads)
        throw std::invalid_argument("lists=" + std::to_string(call.lists) + " must be units or heads");
    run(set.gather, call);
}

void progressive(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
                 const Progressive& ranked, const Output& output) {
    Progressive call = ranked;
    call.attention = decode_row(threads, pool, table, queries);
    write_to(call.attention, output);
    check_units(call.attention, call.units);
    call.attention.keys = Keys::blocks;
    call.attention.block_size = call.block_size;
    call.attention.units = call.units;
    run(set.progressive, call);
}

void sampled(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
             const SampledCall& lists, const Output& output) {
    SampledCall call = lists;
    call.attention = decode_row(threads, pool, table, queries);
    write_to(call.attention, output);
    run(set.sampled, call);
}

void draw(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
          const HashDraw& asked) {
    HashDraw call = asked;
    call.attention = decode_row(threads, pool, table, queries);
    if (call.first > call.last || call.last > call.length || call.length > table.table_blocks * pool.page)
        throw std::invalid_argument("first, last, length must rise and lie within the block table");
    call.room = call.length;
    run(set.draw, call);
}

void learn_tables(const KernelSet& set, const ScoreTables& tables, const TableGain& gain) {
    TableGain call = gain;
    call.tables = tables;
    run(set.learn_tables, call);
}

}  // namespace

void bind_decode(nb::module_& m, KernelSetClass& set) {
    bind_struct<Gather>(
        m, "Gather",
        {field<&Gather::units>("units").at_least(1), field<&Gather::keys>("keys"), field<&Gather::offsets>("offsets"),
         field<&Gather::indices>("indices").or_null(), field<&Gather::k>("k"), field<&Gather::full>("full").optional(),
         field<&Gather::idle>("idle").optional(), field<&Gather::sinks>("sinks").optional(),
         field<&Gather::local>("local").optional(), field<&Gather::idle_keys>("idle_keys").optional(),
         field<&Gather::lists>("lists").at_least(1), field<&Gather::out_offsets>("out_offsets"),
         field<&Gather::chosen>("chosen"), field<&Gather::weights>("weights").optional(),
         field<&Gather::weight_stride>("weight_stride").optional()});
    bind_struct<Progressive>(
        m, "Progressive",
        {field<&Progressive::block_size>("block_size").at_least(1), field<&Progressive::units>("units").at_least(1),
         field<&Progressive::always_count>("always_count"), field<&Progressive::ranked>("ranked"),
         field<&Progressive::listed>("listed"),
         field<&Progressive::microbatch>("microbatch").at_least(1), field<&Progressive::always>("always").or_null(),
         field<&Progressive::order>("order").or_null(), field<&Progressive::epsilon>("epsilon"),
         field<&Progressive::least>("least"), field<&Progressive::mean>("mean"),
         field<&Progressive::estimates>("estimates").optional(), field<&Progressive::margin>("margin"),
         field<&Progressive::used>("used"), field<&Progressive::coverage>("coverage"),
         field<&Progressive::offsets>("offsets"), field<&Progressive::indices>("indices")},
        [](const Progressive& p) {
            if (p.listed > p.ranked || (p.estimates && p.listed != p.ranked) || (p.ranked && !p.listed))
                throw std::invalid_argument("listed must be from 1 to ranked, and ranked with estimates");
            if ((p.always_count && !p.always) || (p.ranked && !p.order))
                throw std::invalid_argument("always and order must be addresses where they list blocks");
        });
    bind_struct<SampledCall>(m, "Sampled",
                             {field<&SampledCall::offsets>("offsets"),
                              field<&SampledCall::indices>("indices").or_null(),
                              field<&SampledCall::bias>("bias").or_null(), field<&SampledCall::sums>("sums")});
    bind_struct<HashDraw>(
        m, "HashDraw",
        {field<&HashDraw::tables>("tables").at_least(2), field<&HashDraw::bits>("bits").within(1, 15),
         field<&HashDraw::first>("first"), field<&HashDraw::last>("last"), field<&HashDraw::length>("length"),
         field<&HashDraw::guard>("guard"), field<&HashDraw::mean>("mean"), field<&HashDraw::asked>("asked"),
         field<&HashDraw::starts>("starts"), field<&HashDraw::order>("order").or_null(),
         field<&HashDraw::counts>("counts"), field<&HashDraw::offsets>("offsets"),
         field<&HashDraw::indices>("indices"), field<&HashDraw::bias>("bias")});
    bind_struct<ScoreTables>(
        m, "ScoreTables",
        {field<&ScoreTables::units>("units").at_least(1), field<&ScoreTables::capacity>("capacity"),
         field<&ScoreTables::first>("first"), field<&ScoreTables::vertical>("vertical").or_null(),
         field<&ScoreTables::slash>("slash").or_null(), field<&ScoreTables::vertical_max>("vertical_max").or_null(),
         field<&ScoreTables::slash_max>("slash_max").or_null(), field<&ScoreTables::sums>("sums"),
         field<&ScoreTables::scale>("scale")});
    bind_struct<TableGain>(
        m, "TableGain",
        {field<&TableGain::threads>("threads").at_least(1), field<&TableGain::heads>("heads").at_least(1),
         field<&TableGain::lists>("lists").at_least(1), field<&TableGain::offsets>("offsets"),
         field<&TableGain::indices>("indices").or_null(), field<&TableGain::weights>("weights").or_null(),
         field<&TableGain::weight_stride>("weight_stride"), field<&TableGain::idle>("idle").optional(),
         field<&TableGain::refresh>("refresh"), field<&TableGain::decay>("decay"),
         field<&TableGain::row>("row")});
    set.def("gather", &gather);
    set.def("progressive", &progressive);
    set.def("sampled", &sampled);
    set.def("draw", &draw);
    set.def("learn_tables", &learn_tables);
}

}  // namespace saccade
