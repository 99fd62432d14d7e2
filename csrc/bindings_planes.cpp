// Products of rows with one matrix, and weights in planes: saccade/ops/planes.py keeps the tensors alive.
#include "planes.h"

#include "bindings.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace saccade {
namespace {

void product_rows(const KernelSet& set, const ProductRows& call) { run(set.product_rows, call); }
void many_rows(const KernelSet& set, const ProductRows& call) {
    if (!set.many_rows || call.matrix.format == WeightFormat::plain || call.storage != Storage::bf16)
        throw std::invalid_argument("tiles multiply bfloat16 by a matrix in planes");
    run(set.many_rows, call);
}
void plane_rows(const KernelSet& set, const PlaneRows& call) { run(set.plane_rows, call); }
void pack(const PackCall& call) { run(pack_planes, call); }

int64_t bytes_of_group(int format, int64_t channels) {
    return group_bytes(plane_traits(static_cast<WeightFormat>(format)), channels);
}

// (name, bits of a code, channels of a record) of each format, in the order of their numbers from 1 on.
nb::list plane_formats() {
    nb::list found;
    for (int number = 1; number < static_cast<int>(WeightFormat::count); ++number) {
        const PlaneTraits traits = plane_traits(static_cast<WeightFormat>(number));
        found.append(nb::make_tuple(kPlaneNames[number - 1], traits.bits, kBlock * traits.blocks));
    }
    return found;
}

void drop(uintptr_t address, int64_t bytes) { drop_pages(reinterpret_cast<const void*>(address), bytes); }

void check_channels(WeightFormat format, int64_t channels) {
    const int64_t width = kBlock * plane_traits(format).blocks;
    if (format != WeightFormat::plain && channels % width)
        throw std::invalid_argument("channels=" + std::to_string(channels) + " must be a multiple of " +
                                    std::to_string(width));
}

}  // namespace

void bind_planes(nb::module_& m, KernelSetClass& set) {
    constexpr int kLast = static_cast<int>(WeightFormat::count) - 1;
    bind_struct<ProductRows>(
        m, "ProductRows",
        {field<&ProductRows::threads>("threads").at_least(1), field<&ProductRows::storage>("storage").within(0, 1),
         field<&ProductRows::rows>("rows"), field<&ProductRows::channels>("channels").at_least(1),
         field<&ProductRows::x>("x").or_null(), field<&ProductRows::matrix>("matrix"),
         field<&ProductRows::out>("out").or_null()},
        [](const ProductRows& c) {
            if (c.rows && !(c.x && c.out)) throw std::invalid_argument("x and out must be addresses");
            check_channels(c.matrix.format, c.channels);
        });
    bind_struct<PlaneRows>(
        m, "PlaneRows",
        {field<&PlaneRows::threads>("threads").at_least(1), field<&PlaneRows::storage>("storage").within(0, 1),
         field<&PlaneRows::matrix>("matrix"), field<&PlaneRows::channels>("channels").at_least(1),
         field<&PlaneRows::ids>("ids").optional(), field<&PlaneRows::first>("first").optional(),
         field<&PlaneRows::count>("count"), field<&PlaneRows::out>("out").or_null()},
        [](const PlaneRows& c) {
            if (c.matrix.format == WeightFormat::plain) throw std::invalid_argument("the matrix must be in planes");
            check_channels(c.matrix.format, c.channels);
            if (c.count && !c.out) throw std::invalid_argument("out must be an address");
            for (int64_t i = 0; i < (c.ids ? c.count : 0); ++i)
                if (c.ids[i] < 0 || c.ids[i] >= c.matrix.rows)
                    throw std::invalid_argument("row " + std::to_string(c.ids[i]) + " is not among the matrix's " +
                                                std::to_string(c.matrix.rows));
            if (!c.ids && c.first + c.count > c.matrix.rows)
                throw std::invalid_argument("the matrix has " + std::to_string(c.matrix.rows) + " rows");
        });
    bind_struct<PackCall>(
        m, "PackPlanes",
        {field<&PackCall::format>("format").within(1, kLast), field<&PackCall::threads>("threads").at_least(1),
         field<&PackCall::rows>("rows").at_least(1), field<&PackCall::channels>("channels").at_least(32),
         field<&PackCall::from>("stored"), field<&PackCall::scales>("scales").optional(),
         field<&PackCall::zeros>("zeros").optional(), field<&PackCall::planes>("planes")},
        [](const PackCall& c) {
            check_channels(c.format, c.channels);
            const Scales kind = plane_traits(c.format).scales;
            if ((kind == Scales::half_zero || kind == Scales::brain_zero) && !(c.scales && c.zeros))
                throw std::invalid_argument("scales and zeros of this format must be addresses");
        });
    set.def("product_rows", &product_rows);
    set.def("many_rows", &many_rows);
    set.def_prop_ro("has_many_rows", [](const KernelSet& own) { return own.many_rows != nullptr; });
    set.def("plane_rows", &plane_rows);
    m.def("pack_planes", &pack);
    m.def("plane_group_bytes", &bytes_of_group, "format"_a, "channels"_a, "Bytes of 16 rows of a matrix in planes.");
    m.def("plane_formats", &plane_formats, "Name, bits of a code and channels of a record of each format, in order.");
    m.def("use_avx_vnni", &use_avx_vnni, "wanted"_a,
          "For tests: have the set avx2 multiply by AVX-VNNI, where the CPU has it, or without it; whether it now does.");
    m.def("drop_pages", &drop, "address"_a, "bytes"_a,
          "Gives back whole pages of a private mapping of a file to which nothing was written.");
}

}  // namespace saccade
