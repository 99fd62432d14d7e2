// What selections are decided from, sums over sampled rows: the Python side keeps the tensors alive.
#include "bindings.h"

namespace nb = nanobind;

namespace saccade {
namespace {

void check_keys(const Attention& a, int64_t k_len) {
    if (k_len < a.q_start + a.q_len || k_len > a.table_blocks * a.page)
        throw std::invalid_argument("k_len=" + std::to_string(k_len) + " does not fit rows that end at " +
                                    std::to_string(a.q_start + a.q_len) + " or the block table");
}

// `call` completed by whose rows and keys it is about.
template <class Call>
Call about(Call call, int threads, const Pool& pool, const BlockTable& table, const Queries& queries) {
    call.attention = attention(threads, pool, table, queries);
    check_keys(call.attention, call.k_len);
    return call;
}

template <class Call>
Call about_rows(const Call& call, int threads, const Pool& pool, const BlockTable& table, const Queries& queries) {
    for (int64_t i = 0; i < call.count; ++i)
        if (call.rows[i] < 0 || call.rows[i] >= queries.q_len)
            throw std::invalid_argument("row " + std::to_string(call.rows[i]) + " is not among the " +
                                        std::to_string(queries.q_len) + " of the call");
    return about(call, threads, pool, table, queries);
}

void line_sums(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
               const LineSums& sums) {
    run(set.line_sums, about_rows(sums, threads, pool, table, queries));
}

void cover_rows(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
                const RowCovers& covers) {
    run(set.cover_rows, about_rows(covers, threads, pool, table, queries));
}

void antidiagonals(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table,
                   const Queries& queries, const Antidiagonals& estimate) {
    if (pool.page % estimate.stride || estimate.block_size % estimate.stride)
        throw std::invalid_argument("stride=" + std::to_string(estimate.stride) + " must divide both block sizes");
    run(set.antidiagonals, about(estimate, threads, pool, table, queries));
}

void row_shares(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
                const RowShares& shares) {
    if (shares.rows > 64) throw std::invalid_argument("rows=" + std::to_string(shares.rows) + " is above 64");
    if (128 % shares.block_size)
        throw std::invalid_argument("block_size=" + std::to_string(shares.block_size) + " must divide 128");
    for (int64_t i = 0; shares.listed && i < shares.count; ++i) {
        const int64_t least = i ? shares.listed[i - 1] + 1 : 0;
        if (shares.listed[i] < least || shares.listed[i] >= queries.q_len)
            throw std::invalid_argument("row " + std::to_string(shares.listed[i]) + " is not a later one of the " +
                                        std::to_string(queries.q_len) + " of the call");
        if (shares.place[i] < 0 || shares.place[i] >= shares.places)
            throw std::invalid_argument("place " + std::to_string(shares.place[i]) + " is not among the " +
                                        std::to_string(shares.places));
    }
    run(set.row_shares, about(shares, threads, pool, table, queries));
}

double cover(const KernelSet& set, const CoverCall& call) {
    nb::gil_scoped_release release;
    return set.cover(call);
}

}  // namespace

void bind_sums(nb::module_& m, KernelSetClass& set) {
    bind_struct<LineSums>(m, "LineSums",
                          {field<&LineSums::rows>("rows"), field<&LineSums::count>("count").at_least(1),
                           field<&LineSums::k_len>("k_len"), field<&LineSums::columns>("columns"),
                           field<&LineSums::slashes>("slashes")});
    bind_struct<RowCovers>(
        m, "RowCovers",
        {field<&RowCovers::rows>("rows"), field<&RowCovers::count>("count").at_least(1),
         field<&RowCovers::k_len>("k_len"), field<&RowCovers::positions>("positions"),
         field<&RowCovers::share>("share"), field<&RowCovers::columns>("columns"),
         field<&RowCovers::distances>("distances"), field<&RowCovers::counts>("counts")});
    bind_struct<Antidiagonals>(m, "Antidiagonals",
                               {field<&Antidiagonals::k_len>("k_len"),
                                field<&Antidiagonals::stride>("stride").at_least(1),
                                field<&Antidiagonals::block_size>("block_size").at_least(1),
                                field<&Antidiagonals::shares>("shares")});
    bind_struct<RowShares>(m, "RowShares",
                           {field<&RowShares::k_len>("k_len"), field<&RowShares::rows>("rows").at_least(1),
                            field<&RowShares::block_size>("block_size").at_least(1),
                            field<&RowShares::shares>("shares"), field<&RowShares::listed>("listed").optional(),
                            field<&RowShares::place>("place").optional(),
                            field<&RowShares::count>("count").optional(),
                            field<&RowShares::places>("places").optional()});
    bind_struct<CoverCall>(
        m, "Cover",
        {field<&CoverCall::weights>("weights"), field<&CoverCall::positions>("positions"),
         field<&CoverCall::count>("count").at_least(1), field<&CoverCall::keys>("keys").at_least(1),
         field<&CoverCall::first>("first"), field<&CoverCall::share>("share"), field<&CoverCall::columns>("columns"),
         field<&CoverCall::distances>("distances"), field<&CoverCall::counts>("counts")});
    set.def("line_sums", &line_sums);
    set.def("cover_rows", &cover_rows);
    set.def("antidiagonals", &antidiagonals);
    set.def("row_shares", &row_shares);
    set.def("cover", &cover);
}

}  // namespace saccade
