// The decode rows of one step, known to the kernels before it runs: a layer then is one call, which stores all rows' keys
// and values, chooses what they read and attends. saccade/ops/cpu_step.py keeps the tensors alive.
#include <nanobind/stl/pair.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <memory>
#include <vector>

#include "choosing.h"
#include "listing.h"
#include "new_rows.h"
#include "resolving.h"
#include "sharing_row.h"
#include "threads.h"

namespace nb = nanobind;

namespace saccade {
namespace {

constexpr int64_t kLong = 8192;  // keys from which a row takes all threads by itself

// One row, or `count` rows one after the other that read everything: `table` is layer 0's, the next layer's lies
// `layer_stride` entries on.
struct StepRow : BlockTable {
    int64_t row, q_start, layer_stride, count = 1;

    BlockTable at(int64_t layer) const {
        BlockTable own = *this;
        own.table += layer * layer_stride;
        return own;
    }
};

class DecodeStep {
    enum class Kind { elsewhere, reads, reads_few, chooses, resolves, lists, shares };
    // What one layer reads: a ReadKeys, BlockChoice, ListedLayer or SharedLayer that Python holds.
    struct Layer {
        Kind kind = Kind::elsewhere;
        const void* what = nullptr;

        template <class T>
        const T& as() const {
            return *static_cast<const T*>(what);
        }
    };
    struct Row {
        StepRow where;
        std::vector<Layer> layers;
        nb::object held;            // what they point to
        const void* how = nullptr;  // of all layers, a ListedKeys or SharedKeys
        int64_t steps = 0;          // that lists have learnt from on top of what their layers say
        // By layer, where blocks are chosen by summaries; where a rule notes what it let in, `units` numbers a layer.
        std::vector<uintptr_t> summaries;
        std::vector<int64_t> summarized;
        std::vector<BlockCodes> codes;
        int64_t* used = nullptr;
        float* coverage = nullptr;
        int64_t units = 0;
        const int32_t* carried = nullptr;  // [layers, carrying units, carries]
        int64_t carrying = 0, carries = 0;
        Residence home;  // of a row whose blocks are not all resident
        float* peaks = nullptr;  // [layers, count, kv_heads, regions] of a row that is several
        int64_t region = 0, regions = 0;

        ChoosingLayer choosing_by(int64_t layer) const {
            const bool carry = carried && layers[layer].as<BlockChoice>().units == carrying;
            return {reinterpret_cast<const void*>(summaries[layer]), summarized[layer],
                    used ? used + layer * units : nullptr, coverage ? coverage + layer * units : nullptr,
                    codes.empty() ? BlockCodes{} : codes[layer],
                    carry ? carried + layer * carrying * carries : nullptr, carry ? carries : 0};
        }
        ListedLayer listed_by(int64_t layer) const {
            ListedLayer own = layers[layer].as<ListedLayer>();
            own.steps += steps;
            if (summaries.empty()) return own;
            own.summary = reinterpret_cast<const void*>(summaries[layer]);
            own.summarized = summarized[layer];
            return own;
        }
        std::unique_ptr<RowWork> work;  // of the layer that runs, and of the next one of its kind
        Kind worked = Kind::elsewhere;
        int64_t keys = 0;

        template <class Work>
        Work& working(Kind kind) {
            if (worked != kind) work = std::make_unique<Work>(), worked = kind;
            return static_cast<Work&>(*work);
        }
    };
    struct Work {
        const KernelSet& set;
        std::vector<Row*> some;
        int threads;
        bool watched;
    };

  public:
    DecodeStep(int64_t layers, int64_t kv_heads, int64_t block_size)
        : layers_(layers), kv_heads_(kv_heads), block_size_(block_size) {
        if (layers < 1 || kv_heads < 1 || block_size < 1)
            throw std::invalid_argument("layers, kv_heads and block_size must be at least 1");
    }

    DecodeStep(const DecodeStep&) = delete;

    // A row that is stored, and attended elsewhere unless reads() or lists() says how: its number.
    int64_t add(const StepRow& where) {
        const int64_t first = where.q_start / block_size_, heads = where.table_head_stride ? kv_heads_ : 1;
        const int64_t last = (where.q_start + where.count - 1) / block_size_;
        if (last >= where.table_blocks) throw std::invalid_argument("the row lies beyond its block table");
        for (int64_t layer = 0; layer < layers_; ++layer)
            for (int64_t at = 0; at < heads * (last - first + 1); ++at)
                if (where.at(layer).table[at % heads * where.table_head_stride + first + at / heads] < 0)
                    throw std::invalid_argument("the block of position " + std::to_string(where.q_start) +
                                                " is in no slot");
        rows_.push_back(std::make_unique<Row>());
        rows_.back()->where = where;
        rows_.back()->layers.resize(layers_);
        return static_cast<int64_t>(rows_.size()) - 1;
    }

    // By layer: Keys, or BlockChoice with the layer's summaries, their codes if there are any, and where to note what a
    // rule let in.
    void reads(int64_t number, nb::list calls, std::vector<uintptr_t> summaries, std::vector<int64_t> summarized,
               nb::list codes, uintptr_t used, uintptr_t coverage, int64_t units) {
        Row& row = at(number);
        check_layers(nb::len(calls));
        const int64_t known = static_cast<int64_t>(std::min(summaries.size(), summarized.size()));
        for (int64_t i = 0; i < layers_; ++i) {
            nb::handle call = calls[i];
            Layer& layer = row.layers[i];
            if (i && call.is(calls[i - 1])) {
                layer = row.layers[i - 1];
                continue;
            }
            if (nb::isinstance<ReadKeys>(call)) layer = {Kind::reads, &nb::cast<const ReadKeys&>(call)};
            else layer = {Kind::chooses, &nb::cast<const BlockChoice&>(call)};
            if (row.where.count > 1) {
                if (layer.kind != Kind::reads || layer.as<ReadKeys>().keys != Keys::dense)
                    throw std::invalid_argument("several rows of a sequence read everything");
                layer.kind = Kind::reads_few;
            }
            if (layer.kind == Kind::chooses && i >= known)
                throw std::invalid_argument("summaries of layer " + std::to_string(i) + " are missing");
        }
        if (nb::len(codes)) check_layers(nb::len(codes));
        row.codes.clear();
        for (nb::handle one : codes) row.codes.push_back(nb::cast<const BlockCodes&>(one));
        row.held = calls;
        row.summaries = std::move(summaries);
        row.summarized = std::move(summarized);
        row.used = reinterpret_cast<int64_t*>(used);
        row.coverage = reinterpret_cast<float*>(coverage);
        row.units = units;
    }

    // Layers that choose blocks for `units` units also read `carried` [layers, units, carries], see ChoosingLayer.
    void carries(int64_t number, uintptr_t carried, int64_t units, int64_t carries) {
        Row& row = at(number);
        if (units < 1 || carries < 1) throw std::invalid_argument("units and carries must be at least 1");
        row.carried = reinterpret_cast<const int32_t*>(carried);
        row.carrying = units;
        row.carries = carries;
    }

    // A row that chooses blocks in every layer, some of which may be in no slot. It is stored once it knows its own.
    void resolves(int64_t number, const Residence& home) {
        Row& row = at(number);
        for (const Layer& layer : row.layers)
            if (layer.kind != Kind::chooses) throw std::invalid_argument("a row whose blocks may be absent chooses blocks");
        if (home.layer_stride < 1 || home.room < 1) throw std::invalid_argument("layer_stride and room must be at least 1");
        for (Layer& layer : row.layers) layer.kind = Kind::resolves;
        row.home = home;
    }
    // Of such a row at the layer that ran last: how many blocks it reads, and how many of them are in no slot; where
    // there are some the layer has done nothing yet, and runs again.
    std::pair<int64_t, int64_t> wanted(int64_t number) {
        Row& row = at(number);
        if (row.worked != Kind::resolves) throw std::invalid_argument("the row has looked nothing up");
        const Resolving& own = row.working<Resolving>(row.worked);
        return {own.wanted(), own.missing()};
    }

    // Several rows of a sequence that read everything also leave `peaks` [layers, rows, kv_heads, regions], see FewRows.
    void weighs(int64_t number, uintptr_t peaks, int64_t region, int64_t regions) {
        Row& row = at(number);
        if (row.where.count < 2 || region < 1 || region > 128 || region & (region - 1) || regions < 1 ||
            (row.where.q_start + row.where.count - 1) / region >= regions)
            throw std::invalid_argument("regions of 1 to 128 keys that cover all of several rows are needed");
        row.peaks = reinterpret_cast<float*>(peaks);
        row.region = region;
        row.regions = regions;
    }

    // Every layer reads the best of its candidates; `summaries` where blocks name some.
    void lists(int64_t number, nb::object keys, nb::list layers, std::vector<uintptr_t> summaries,
               std::vector<int64_t> summarized, int64_t steps) {
        Row& row = at(number);
        const ListedKeys& how = nb::cast<const ListedKeys&>(keys);
        if (summaries.size() != summarized.size() || (how.blocks && static_cast<int64_t>(summaries.size()) != layers_))
            throw std::invalid_argument("one of each layer is needed");
        hold<ListedLayer>(row, Kind::lists, keys, layers);
        row.how = &how;
        row.steps = steps;
        row.summaries = std::move(summaries);
        row.summarized = std::move(summarized);
        if (!how.blocks) row.summaries.clear();
    }

    // Before a layer's queries, of `heads` heads, are there: what lists can tell of their candidates by then.
    void foresee(const KernelSet& set, int threads, int64_t layer, int64_t heads) {
        if (layer < 0 || layer >= layers_ || threads < 1) throw std::invalid_argument("there is no such layer");
        struct Foreseeing {
            const KernelSet& set;
            std::vector<std::pair<Listing*, Row*>> some;
            int threads;
            int64_t layer, heads;
        } work{set, {}, threads, layer, heads};
        for (const auto& row : rows_)
            if (row->layers[layer].kind == Kind::lists) work.some.push_back({&row->working<Listing>(Kind::lists), row.get()});
        nb::gil_scoped_release release;
        parallel_for(
            static_cast<int64_t>(work.some.size()), threads,
            [](void* context, int64_t i) {
                const Foreseeing& all = *static_cast<const Foreseeing*>(context);
                const auto& [listing, row] = all.some[i];
                listing->foresee(all.set, *static_cast<const ListedKeys*>(row->how), row->listed_by(all.layer),
                                 all.heads, row->where.q_start, all.threads);
            },
            &work);
    }
    // Blocks in which a row read at the layer that ran last.
    int64_t touched(int64_t number) {
        Row& row = at(number);
        if (!row.work) throw std::invalid_argument("the row has read nothing");
        return row.work->touched();
    }

    // Every layer reads what it shares, or retrieves.
    void shares(int64_t number, nb::object keys, nb::list layers) {
        Row& row = at(number);
        row.how = &nb::cast<const SharedKeys&>(keys);
        hold<SharedLayer>(row, Kind::shares, keys, layers);
    }

    // Stores the new keys and values and, if it `attends`, writes the attention of those rows that say how.
    // If `watched`, returns the share of the rows' time that went to choosing and learning, else 0.
    double run(const KernelSet& set, int threads, int64_t layer, const Pool& pool, const NewRows& fresh,
             const Queries& queries, const Output& output, bool attends, bool follows, bool watched) {
        if (layer < 0 || layer >= layers_) throw std::invalid_argument("there is no layer " + std::to_string(layer));
        Work work{set, {}, threads, watched};
        if (fresh.k)
            for (const auto& row : rows_) {
                if (row->layers[layer].kind == Kind::resolves) continue;
                const BlockTable table = row->where.at(layer);
                for (int64_t i = 0; i < row->where.count; ++i)
                    store_row(pool, fresh, row->where.row + i, table, row->where.q_start + i);
            }
        for (const auto& one : rows_) {
            Row& row = *one;
            const Layer& own = row.layers[layer];
            if (!attends || own.kind == Kind::elsewhere) continue;
            Attention a = row_of(threads, pool, queries, row.where.at(layer), row.where.row, row.where.q_start, output,
                                 row.where.count);
            row.keys = a.q_start + 1;
            if (own.kind == Kind::reads) {
                Reading& reading = row.working<Reading>(own.kind);
                reading.begin(a, own.as<ReadKeys>());
                row.keys = reading.keys();
            } else if (own.kind == Kind::reads_few) {
                const int64_t each = row.where.count * kv_heads_ * row.regions;
                row.working<ReadingFew>(own.kind)
                    .begin(a, row.peaks ? row.peaks + layer * each : nullptr, row.region, row.regions);
            } else if (own.kind == Kind::chooses) {
                row.working<Choosing>(own.kind).begin(a, own.as<BlockChoice>(), row.choosing_by(layer));
            } else if (own.kind == Kind::resolves) {
                row.working<Resolving>(own.kind)
                    .begin(a, own.as<BlockChoice>(), row.choosing_by(layer), row.home, layer, fresh, row.where.row);
            } else if (own.kind == Kind::lists) {
                row.working<Listing>(own.kind)
                    .begin(a, *static_cast<const ListedKeys*>(row.how), row.listed_by(layer));
            } else {
                row.working<Sharing>(own.kind)
                    .begin(a, *static_cast<const SharedKeys*>(row.how), own.as<SharedLayer>());
            }
            work.some.push_back(&row);
        }
        if (work.some.empty()) return 0;
        nb::gil_scoped_release release;
        const int64_t count = static_cast<int64_t>(work.some.size());
        std::stable_partition(work.some.begin(), work.some.end(), [](const Row* row) { return row->keys >= kLong; });
        parallel_for(
            count, threads,
            [](void* context, int64_t i) {
                const Work& all = *static_cast<const Work*>(context);
                Row& row = *all.some[i];  // what it gets does not depend on how many threads make it
                const bool alone = static_cast<int64_t>(all.some.size()) >= all.threads && row.keys < kLong;
                row.work->phases.begin(all.watched);
                row.work->run(all.set, alone ? 1 : all.threads);
            },
            &work, follows);
        double spent[Phases::count] = {};
        for (const Row* row : work.some)
            for (int i = 0; i < Phases::count; ++i) spent[i] += row->work->phases.seconds(static_cast<Phases::Phase>(i));
        const double all = spent[Phases::choosing] + spent[Phases::reading];
        return all > 0 ? spent[Phases::choosing] / all : 0;
    }

  private:
    Row& at(int64_t number) {
        if (number < 0 || number >= static_cast<int64_t>(rows_.size()))
            throw std::invalid_argument("there is no row " + std::to_string(number));
        return *rows_[number];
    }
    void check_layers(size_t count) const {
        if (static_cast<int64_t>(count) != layers_) throw std::invalid_argument("one call a layer is needed");
    }
    template <class T>
    void hold(Row& row, Kind kind, nb::object keys, nb::list layers) {
        check_layers(nb::len(layers));
        for (int64_t i = 0; i < layers_; ++i) row.layers[i] = {kind, &nb::cast<const T&>(nb::handle(layers[i]))};
        row.held = nb::make_tuple(keys, layers);
    }

    int64_t layers_, kv_heads_, block_size_;
    std::vector<std::unique_ptr<Row>> rows_;
};

double run_step(const KernelSet& set, DecodeStep& step, int threads, int64_t layer, const Pool& pool, const NewRows& fresh,
              const Queries& queries, const Output& output, bool attends, bool follows, bool watched) {
    return step.run(set, threads, layer, pool, fresh, queries, output, attends, follows, watched);
}

void foresee_step(const KernelSet& set, DecodeStep& step, int threads, int64_t layer, int64_t heads) {
    step.foresee(set, threads, layer, heads);
}

}  // namespace

void bind_step(nb::module_& m, KernelSetClass& set) {
    bind_struct<BlockChoice>(
        m, "BlockChoice",
        {field<&BlockChoice::size>("size").at_least(1), field<&BlockChoice::units>("units").at_least(1),
         field<&BlockChoice::parts>("parts").within(1, 2), field<&BlockChoice::first>("first"),
         field<&BlockChoice::last>("last").at_least(1), field<&BlockChoice::take>("take").optional(),
         field<&BlockChoice::microbatch>("microbatch").optional(), field<&BlockChoice::epsilon>("epsilon").optional(),
         field<&BlockChoice::least>("least").optional(), field<&BlockChoice::mean>("mean").optional()});
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
         field<&ListedKeys::unbounded>("unbounded").optional(), field<&ListedKeys::gate>("gate").within(0, 2).optional(),
         field<&ListedKeys::before>("before").within(0, 63).optional(),
         field<&ListedKeys::after>("after").within(0, 63).optional(),
         field<&ListedKeys::blocks>("blocks").optional(),
         field<&ListedKeys::block_size>("block_size").at_least(1).optional(),
         field<&ListedKeys::bypass_local>("bypass_local").optional(), field<&ListedKeys::probes>("probes").optional(),
         field<&ListedKeys::places>("places").optional(), field<&ListedKeys::epsilon>("epsilon").optional(),
         field<&ListedKeys::decay>("decay").optional(), field<&ListedKeys::bypass>("bypass").within(0, 2).optional(),
         field<&ListedKeys::apart>("apart").optional()});
    bind_struct<ListedLayer>(
        m, "ListedLayer",
        {field<&ListedLayer::tally>("tally"), field<&ListedLayer::tables>("tables").optional(),
         field<&ListedLayer::mean_key>("mean_key").optional(), field<&ListedLayer::mean_value>("mean_value").optional(),
         field<&ListedLayer::spread>("spread").optional(), field<&ListedLayer::steps>("steps").optional()});
    bind_struct<SharedKeys>(
        m, "SharedKeys",
        {field<&SharedKeys::units>("units").at_least(1), field<&SharedKeys::sinks>("sinks"),
         field<&SharedKeys::local>("local").at_least(1), field<&SharedKeys::best>("best").at_least(1),
         field<&SharedKeys::tau>("tau"), field<&SharedKeys::cover_gap>("cover_gap"),
         field<&SharedKeys::follow>("follow"), field<&SharedKeys::reach>("reach"),
         field<&SharedKeys::spread>("spread")});
    bind_struct<SharedLayer>(
        m, "SharedLayer",
        {field<&SharedLayer::tally>("tally"), field<&SharedLayer::directions>("directions"),
         field<&SharedLayer::has>("has"), field<&SharedLayer::counts>("counts"), field<&SharedLayer::keys>("keys"),
         field<&SharedLayer::moving>("moving").or_null(), field<&SharedLayer::positions>("positions"),
         field<&SharedLayer::count>("count"), field<&SharedLayer::window>("window"),
         field<&SharedLayer::channels>("channels").at_least(16), field<&SharedLayer::capacity>("capacity").at_least(1),
         field<&SharedLayer::most>("most"), field<&SharedLayer::room>("room").at_least(1)});
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
        .def("lists", &DecodeStep::lists)
        .def("carries", &DecodeStep::carries)
        .def("weighs", &DecodeStep::weighs)
        .def("shares", &DecodeStep::shares)
        .def("resolves", &DecodeStep::resolves)
        .def("wanted", &DecodeStep::wanted)
        .def("touched", &DecodeStep::touched);
    set.def("run_step", &run_step);
    set.def("foresee_step", &foresee_step);
}

}  // namespace saccade
