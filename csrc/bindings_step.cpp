// What the module knows of a decode step's rows, see decode_step.h.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include "decode_step.h"

namespace nb = nanobind;

namespace saccade {
namespace {

double run_step(const KernelSet& set, DecodeStep& step, int threads, int64_t layer, const Pool& pool,
                const NewRows& fresh, const Queries& queries, const Output& output, bool attends, bool follows,
                bool watched) {
    nb::gil_scoped_release release;
    return step.run(set, threads, layer, pool, fresh, queries, output, attends, follows, watched);
}

void foresee_step(const KernelSet& set, DecodeStep& step, int threads, int64_t layer, int64_t heads) {
    nb::gil_scoped_release release;
    step.foresee(set, threads, layer, heads);
}

// What tables choose for one row that is read elsewhere.
void choose_listed(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
                   const ListedKeys& keys, const ListedLayer& layer, const ListedChoice& out) {
    if (queries.q_len != 1 || !keys.tables) throw std::invalid_argument("tables choose for one row");
    const Attention row = attention(threads, pool, table, queries);
    nb::gil_scoped_release release;
    Listing listing;
    listing.begin(row, keys, layer);
    listing.choose(set, out);
}

}  // namespace

void bind_step(nb::module_& m, KernelSetClass& set) {
    bind_struct<BlockChoice>(
        m, "BlockChoice",
        {field<&BlockChoice::size>("size").at_least(1), field<&BlockChoice::units>("units").at_least(1),
         field<&BlockChoice::parts>("parts").within(0, 2), field<&BlockChoice::first>("first"),
         field<&BlockChoice::last>("last").at_least(1), field<&BlockChoice::take>("take").optional(),
         field<&BlockChoice::microbatch>("microbatch").optional(), field<&BlockChoice::epsilon>("epsilon").optional(),
         field<&BlockChoice::least>("least").optional(), field<&BlockChoice::mean>("mean").optional(),
         field<&BlockChoice::guessed>("guessed").optional(), field<&BlockChoice::margin>("margin").optional()});
    bind_struct<StepRow>(
        m, "StepRow",
        {field<&StepRow::row>("row"), field<&StepRow::q_start>("q_start"), field<&StepRow::table, StepRow>("slots"),
         field<&StepRow::table_head_stride, StepRow>("head_stride"),
         field<&StepRow::layer_stride>("layer_stride"), field<&StepRow::count>("count").at_least(1).optional(),
         field<&StepRow::table_blocks, StepRow>("blocks").at_least(1)},
        [](const StepRow& row) { check_table(row); });
    bind_struct<ListedKeys>(
        m, "ListedKeys",
        {field<&ListedKeys::units>("units").at_least(1), field<&ListedKeys::sinks>("sinks"),
         field<&ListedKeys::local>("local"), field<&ListedKeys::best>("best"),
         field<&ListedKeys::tables>("tables").optional(), field<&ListedKeys::a>("a").optional(),
         field<&ListedKeys::before>("before").within(0, 63).optional(),
         field<&ListedKeys::after>("after").within(0, 63).optional(),
         field<&ListedKeys::blocks>("blocks").optional(),
         field<&ListedKeys::block_size>("block_size").at_least(1).optional(),
         field<&ListedKeys::probes>("probes").optional(),
         field<&ListedKeys::places>("places").optional(), field<&ListedKeys::epsilon>("epsilon").optional(),
         field<&ListedKeys::decay>("decay").optional()});
    bind_struct<ListedLayer>(
        m, "ListedLayer",
        {field<&ListedLayer::tally>("tally").optional(), field<&ListedLayer::tables>("tables").optional(),
         field<&ListedLayer::mean_key>("mean_key").optional(), field<&ListedLayer::mean_value>("mean_value").optional(),
         field<&ListedLayer::spread>("spread").optional(), field<&ListedLayer::steps>("steps").optional(),
         field<&ListedLayer::summary>("summary").optional(), field<&ListedLayer::summarized>("summarized").optional()});
    bind_struct<ListedChoice>(
        m, "ListedChoice",
        {field<&ListedChoice::offsets>("offsets"), field<&ListedChoice::indices>("indices"),
         field<&ListedChoice::idle>("idle"), field<&ListedChoice::rest>("rest")});
    bind_struct<SharedKeys>(
        m, "SharedKeys",
        {field<&SharedKeys::units>("units").at_least(1), field<&SharedKeys::sinks>("sinks"),
         field<&SharedKeys::local>("local").at_least(1), field<&SharedKeys::best>("best").at_least(1),
         field<&SharedKeys::tau>("tau"), field<&SharedKeys::follow>("follow"), field<&SharedKeys::reach>("reach"),
         field<&SharedKeys::spread>("spread")});
    bind_struct<SharedLayer>(
        m, "SharedLayer",
        {field<&SharedLayer::tally>("tally"), field<&SharedLayer::directions>("directions"),
         field<&SharedLayer::has>("has"), field<&SharedLayer::counts>("counts"), field<&SharedLayer::keys>("keys"),
         field<&SharedLayer::moving>("moving").or_null(), field<&SharedLayer::positions>("positions"),
         field<&SharedLayer::count>("count"), field<&SharedLayer::window>("window"),
         field<&SharedLayer::channels>("channels").at_least(16), field<&SharedLayer::capacity>("capacity").at_least(1),
         field<&SharedLayer::most>("most"), field<&SharedLayer::room>("room").at_least(1)});
    bind_struct<KeptKeys>(
        m, "KeptKeys",
        {field<&KeptKeys::units>("units").at_least(1), field<&KeptKeys::budget>("budget").optional(),
         field<&KeptKeys::recent>("recent").optional()});
    bind_struct<KeptLayer>(
        m, "KeptLayer",
        {field<&KeptLayer::tally>("tally"), field<&KeptLayer::keys>("keys"), field<&KeptLayer::counts>("counts"),
         field<&KeptLayer::sums>("sums").optional(), field<&KeptLayer::room>("room").at_least(1)});
    bind_struct<Residence>(
        m, "Residence",
        {field<&Residence::ids>("ids"), field<&Residence::map>("map"), field<&Residence::layer_stride>("layer_stride"),
         field<&Residence::count>("count").at_least(1), field<&Residence::nowhere>("nowhere"),
         field<&Residence::table>("table"), field<&Residence::blocks>("blocks"), field<&Residence::slots>("slots"),
         field<&Residence::room>("room"), field<&Residence::reach>("reach").or_null().optional()});
    nb::class_<DecodeStep>(m, "DecodeStep")
        .def(nb::init<int64_t, int64_t, int64_t>())
        .def("add", &DecodeStep::add)
        .def("reads", &DecodeStep::reads)
        .def("guesses", &DecodeStep::guesses)
        .def("lists", &DecodeStep::lists)
        .def("carries", &DecodeStep::carries)
        .def("weighs", &DecodeStep::weighs)
        .def("shares", &DecodeStep::shares)
        .def("keeps", &DecodeStep::keeps)
        .def("asks", &DecodeStep::asks)
        .def("resolves", &DecodeStep::resolves)
        .def("wanted", &DecodeStep::wanted)
        .def("touched", &DecodeStep::touched);
    set.def("run_step", &run_step);
    set.def("foresee_step", &foresee_step);
    set.def("choose_listed", &choose_listed);
}

}  // namespace saccade
