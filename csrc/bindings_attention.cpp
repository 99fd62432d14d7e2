// Attention over a selection, and rows stored: saccade/ops/cpu.py and cpu_rows.py keep the tensors alive.
#include <nanobind/stl/vector.h>

#include <vector>

#include "bindings.h"
#include "new_rows.h"
#include "threads.h"

namespace nb = nanobind;

namespace saccade {
namespace {

void check_pool(const Pool& p) {
    if (p.page & (p.page - 1)) throw std::invalid_argument("block_size must be a power of two");
    if (p.value_dim < 0 || p.value_dim > p.head_dim)
        throw std::invalid_argument("value_dim=" + std::to_string(p.value_dim) + " must be at most head_dim");
}

void check_keys(const ReadKeys& k) {
    const bool blocks = k.keys == Keys::blocks, lines = k.keys == Keys::lines;
    if (blocks && (k.block_size < 1 || k.q_blocks < 1))
        throw std::invalid_argument("lists of blocks need a block_size and q_blocks");
    if ((blocks || lines) && !k.offsets) throw std::invalid_argument("lists need offsets");
    if (lines && !k.distance_offsets) throw std::invalid_argument("lines need distance_offsets");
}

void attend(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
            const ReadKeys& keys, const Output& output) {
    Attention a = attention(threads, pool, table, queries);
    read_keys(a, keys);
    write_to(a, output);
    run(a.q_len == 1 && a.keys != Keys::lines && !a.starts ? set.decode : set.prefill, a);
}

// A few rows of one sequence over all its keys or a band of them, which are read once for all of them.
void attend_few(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
                const ReadKeys& keys, const Output& output) {
    FewRows f{attention(threads, pool, table, queries), false};
    if (keys.keys != Keys::dense && keys.keys != Keys::band)
        throw std::invalid_argument("a few rows read all keys or a band");
    read_keys(f.attention, keys);
    write_to(f.attention, output);
    run(set.few_rows, f);
}

// Decode rows of several sequences in one pool: `queries` and `output` hold the rows of all of them, the latter as
// [rows, heads, head_dim] and [rows, heads].
void attend_rows(const KernelSet& set, int threads, const Pool& pool, const Queries& queries,
                 const std::vector<DecodeRow>& calls, const Output& output) {
    constexpr int64_t kLong = 8192;  // keys from which a row takes all threads by itself
    struct Rows {
        const KernelSet& set;
        std::vector<Attention> some;
    } rows{set, {}}, large{set, {}};
    for (const DecodeRow& call : calls) {
        Attention a = row_of(threads, pool, queries, call, call.row, call.q_start, output);
        read_keys(a, call.reads);
        int64_t keys = a.q_start + 1;
        if (a.keys == Keys::band && a.window + a.sinks < keys) keys = a.window + a.sinks;
        if (a.keys == Keys::blocks) keys = a.offsets[a.units] / a.units * a.block_size;
        (keys < kLong ? rows : large).some.push_back(a);
    }
    nb::gil_scoped_release release;
    for (const Attention& a : large.some) set.decode(a);
    const int64_t count = static_cast<int64_t>(rows.some.size());
    if (count >= threads)  // a result does not depend on how many threads made it
        for (Attention& a : rows.some) a.threads = 1;
    parallel_for(
        count, count >= threads ? threads : 1,
        [](void* context, int64_t i) {
            const Rows& all = *static_cast<const Rows*>(context);
            all.set.decode(all.some[i]);
        },
        &rows);
}

// True attention of one row's query heads of one KV head.
void group_truth(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
                 const ReadKeys& keys, const GroupTruth& truth) {
    GroupTruth call = truth;
    call.attention = attention(threads, pool, table, queries);
    if (queries.q_len != 1 || (keys.keys != Keys::dense && keys.keys != Keys::band))
        throw std::invalid_argument("a truth is of one row over all keys or a band");
    if (call.kv_head >= pool.kv_heads)
        throw std::invalid_argument("kv_head " + std::to_string(call.kv_head) + " must be 0 to " +
                                    std::to_string(pool.kv_heads - 1));
    read_keys(call.attention, keys);
    run(set.group_truth, call);
}

int64_t number(PyObject* x, const char* what, int64_t stop) {
    const long long value = PyLong_AsLongLong(x);
    if (value == -1 && PyErr_Occurred()) throw nb::python_error();
    if (value < 0 || value >= stop)
        throw std::invalid_argument(std::string(what) + " " + std::to_string(value) + " must be 0 to " +
                                    std::to_string(stop - 1));
    return value;
}

// Copies rows to places (row, slot, offset in the slot); slot is a number, or a tuple of one for each KV head.
void store_rows(const Pool& pool, const NewRows& rows, nb::list places) {
    for (nb::handle place : places) {
        PyObject* p = place.ptr();
        if (!PyTuple_Check(p) || PyTuple_GET_SIZE(p) != 3)
            throw std::invalid_argument("a place must be (row, slot, offset)");
        const int64_t row = number(PyTuple_GET_ITEM(p, 0), "row", rows.count);
        const int64_t offset = number(PyTuple_GET_ITEM(p, 2), "offset", pool.page);
        PyObject* slots = PyTuple_GET_ITEM(p, 1);
        const bool own = PyTuple_Check(slots);
        if (own && PyTuple_GET_SIZE(slots) != pool.kv_heads)
            throw std::invalid_argument("slots of a place must be one, or one for each KV head");
        int64_t slot = own ? 0 : number(slots, "slot", pool.slots);
        for (int64_t h = 0; h < pool.kv_heads; ++h) {
            if (own) slot = number(PyTuple_GET_ITEM(slots, h), "slot", pool.slots);
            store_head(pool, rows, row, h, slot, offset);
        }
    }
}

}  // namespace

void bind_attention(nb::module_& m, KernelSetClass& set) {
    bind_struct<Pool>(m, "Pool",
                      {field<&Pool::k_pool>("k"), field<&Pool::v_pool>("v"), field<&Pool::slots>("slots").at_least(1),
                       field<&Pool::kv_heads>("kv_heads").at_least(1), field<&Pool::page>("block_size").at_least(16),
                       field<&Pool::head_dim>("head_dim").at_least(1),
                       field<&Pool::storage>("storage").within(0, 1),
                       field<&Pool::format>("format").within(0, kLastFormat),
                       field<&Pool::value_dim>("value_dim").optional()},
                      &check_pool);
    bind_struct<BlockTable>(m, "BlockTable",
                            {field<&BlockTable::table>("slots"), field<&BlockTable::table_head_stride>("head_stride"),
                             field<&BlockTable::table_blocks>("blocks").at_least(1)},
                            &check_table);
    bind_struct<Queries>(m, "Queries",
                         {field<&Queries::q>("q"), field<&Queries::q_head_stride>("head_stride"),
                          field<&Queries::q_row_stride>("row_stride"), field<&Queries::heads>("heads").at_least(1),
                          field<&Queries::q_len>("q_len").at_least(1), field<&Queries::q_start>("q_start"),
                          field<&Queries::scale>("scale"), field<&Queries::softcap>("softcap")});
    bind_struct<ReadKeys>(
        m, "Keys",
        {field<&ReadKeys::keys>("kind").within(0, 3), field<&ReadKeys::window>("window").optional(),
         field<&ReadKeys::sinks>("sinks").optional(), field<&ReadKeys::block_size>("block_size").optional(),
         field<&ReadKeys::units>("units").at_least(1).optional(), field<&ReadKeys::q_blocks>("q_blocks").optional(),
         field<&ReadKeys::offsets>("offsets").optional(), field<&ReadKeys::indices>("indices").optional(),
         field<&ReadKeys::distance_offsets>("distance_offsets").optional(),
         field<&ReadKeys::distances>("distances").optional(), field<&ReadKeys::active>("active").optional(),
         field<&ReadKeys::starts>("starts").optional(), field<&ReadKeys::sink_keys>("sink_keys").optional()},
        &check_keys);
    bind_struct<Output>(m, "Output",
                        {field<&Output::out>("out"), field<&Output::lse>("lse"),
                         field<&Output::out_rows>("rows").at_least(1)});
    bind_struct<GroupTruth>(m, "GroupTruth",
                            {field<&GroupTruth::kv_head>("kv_head"), field<&GroupTruth::out>("out"),
                             field<&GroupTruth::lse>("lse"), field<&GroupTruth::scale>("scale")});
    bind_struct<DecodeRow>(
        m, "DecodeRow",
        {field<&DecodeRow::row>("row"), field<&DecodeRow::q_start>("q_start"),
         field<&DecodeRow::table, DecodeRow>("slots"), field<&DecodeRow::table_head_stride, DecodeRow>("head_stride"),
         field<&DecodeRow::table_blocks, DecodeRow>("blocks").at_least(1),
         field<&DecodeRow::reads>("keys")},
        [](const DecodeRow& row) { check_table(row); });
    bind_struct<NewRows>(m, "NewRows",
                         {field<&NewRows::k>("k").or_null(),
                          field<&NewRows::v>("v").or_null(), field<&NewRows::head_stride>("head_stride"),
                          field<&NewRows::row_stride>("row_stride"), field<&NewRows::count>("count")},
                         [](const NewRows& rows) {
                             if (!rows.k != !rows.v || !rows.k != !rows.count)
                                 throw std::invalid_argument("k, v and a count of at least 1 go together");
                         });
    set.def("attend_few", &attend_few);
    set.def("attend", &attend);
    set.def("group_truth", &group_truth);
    set.def("attend_rows", &attend_rows);
    m.def("store_rows", &store_rows);
}

}  // namespace saccade
