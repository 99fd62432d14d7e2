// The decode rows of one step, known to the kernels before it runs: a layer then is one call, which stores all rows' keys
// and values, chooses what they read and attends. saccade/ops/cpu_plans.py keeps the tensors alive.
#pragma once

#include <algorithm>
#include <memory>
#include <utility>
#include <vector>

#include "new_rows.h"
#include "step_row.h"
#include "threads.h"

namespace saccade {

class DecodeStep {
  public:
    DecodeStep(int64_t layers, int64_t kv_heads, int64_t block_size)
        : layers_(layers), kv_heads_(kv_heads), block_size_(block_size) {
        if (layers < 1 || kv_heads < 1 || block_size < 1)
            throw std::invalid_argument("layers, kv_heads and block_size must be at least 1");
    }

    DecodeStep(const DecodeStep&) = delete;

    int64_t layers() const { return layers_; }

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
        rows_.push_back(std::make_unique<PlannedRow>());
        rows_.back()->where = where;
        rows_.back()->layers.resize(layers_);
        return static_cast<int64_t>(rows_.size()) - 1;
    }

    // By layer: Keys, or BlockChoice with the layer's summaries, their codes if there are any, and where to note what a
    // rule let in.
    void reads(int64_t number, nanobind::list calls, std::vector<uintptr_t> summaries, std::vector<int64_t> summarized,
               nanobind::list codes, uintptr_t used, uintptr_t coverage, int64_t units) {
        PlannedRow& row = at(number);
        check_layers(nanobind::len(calls));
        const int64_t known = static_cast<int64_t>(std::min(summaries.size(), summarized.size()));
        for (int64_t i = 0; i < layers_; ++i) {
            nanobind::handle call = calls[i];
            LayerReading& layer = row.layers[i];
            if (i && call.is(calls[i - 1])) {
                layer = row.layers[i - 1];
                continue;
            }
            if (nanobind::isinstance<ReadKeys>(call)) layer = {RowKind::reads, &nanobind::cast<const ReadKeys&>(call)};
            else layer = {RowKind::chooses, &nanobind::cast<const BlockChoice&>(call)};
            if (row.where.count > 1) {
                const Keys keys = layer.kind == RowKind::reads ? layer.as<ReadKeys>().keys : Keys::blocks;
                if (keys != Keys::dense && keys != Keys::band)
                    throw std::invalid_argument("several rows of a sequence read everything or a band");
                layer.kind = RowKind::reads_few;
            }
            if (layer.kind == RowKind::chooses && i >= known)
                throw std::invalid_argument("summaries of layer " + std::to_string(i) + " are missing");
        }
        if (nanobind::len(codes)) check_layers(nanobind::len(codes));
        row.codes.clear();
        for (nanobind::handle one : codes) row.codes.push_back(nanobind::cast<const BlockCodes&>(one));
        row.held = calls;
        row.summaries = std::move(summaries);
        row.summarized = std::move(summarized);
        row.used = reinterpret_cast<int64_t*>(used);
        row.coverage = reinterpret_cast<float*>(coverage);
        row.units = units;
    }

    // Every layer chooses blocks by labels of their keys; notes as of reads().
    void guesses(int64_t number, nanobind::object choice, nanobind::list layers, uintptr_t used, uintptr_t coverage,
                 int64_t units) {
        PlannedRow& row = at(number);
        row.how = &nanobind::cast<const BlockChoice&>(choice);
        hold<LabelKeys>(row, RowKind::guesses, choice, layers);
        row.used = reinterpret_cast<int64_t*>(used);
        row.coverage = reinterpret_cast<float*>(coverage);
        row.units = units;
    }

    // Layers that choose blocks for `units` units also read `carried` [layers, units, carries], see ChoosingLayer.
    void carries(int64_t number, uintptr_t carried, int64_t units, int64_t carries) {
        PlannedRow& row = at(number);
        if (units < 1 || carries < 1) throw std::invalid_argument("units and carries must be at least 1");
        row.carried = reinterpret_cast<const int32_t*>(carried);
        row.carrying = units;
        row.carries = carries;
    }

    // A row that chooses blocks in every layer, some of which may be in no slot. It is stored once it knows its own.
    void resolves(int64_t number, const Residence& home) {
        PlannedRow& row = at(number);
        for (const LayerReading& layer : row.layers)
            if (layer.kind != RowKind::chooses)
                throw std::invalid_argument("a row whose blocks may be absent chooses blocks");
        if (home.layer_stride < 1 || home.room < 1) throw std::invalid_argument("layer_stride and room must be at least 1");
        for (LayerReading& layer : row.layers) layer.kind = RowKind::resolves;
        row.home = home;
    }
    // Of such a row at the layer that ran last: how many blocks it reads, and how many of them are in no slot; where
    // there are some the layer has done nothing yet, and runs again.
    std::pair<int64_t, int64_t> wanted(int64_t number) {
        PlannedRow& row = at(number);
        if (row.worked != RowKind::resolves) throw std::invalid_argument("the row has looked nothing up");
        const Resolving& own = row.working<Resolving>(row.worked);
        return {own.wanted(), own.missing()};
    }

    // Several rows of a sequence also leave `peaks` [layers, rows, kv_heads, regions], see FewRows.
    void weighs(int64_t number, uintptr_t peaks, int64_t region, int64_t regions) {
        PlannedRow& row = at(number);
        if (row.where.count < 2 || region < 1 || region > 128 || region & (region - 1) || regions < 1 ||
            (row.where.q_start + row.where.count - 1) / region >= regions)
            throw std::invalid_argument("regions of 1 to 128 keys that cover all of several rows are needed");
        row.peaks = reinterpret_cast<float*>(peaks);
        row.region = region;
        row.regions = regions;
    }

    // Every layer reads the best of its candidates; `summaries` where blocks name some.
    void lists(int64_t number, nanobind::object keys, nanobind::list layers, std::vector<uintptr_t> summaries,
               std::vector<int64_t> summarized, int64_t steps) {
        PlannedRow& row = at(number);
        const ListedKeys& how = nanobind::cast<const ListedKeys&>(keys);
        if (summaries.size() != summarized.size() || (how.blocks && static_cast<int64_t>(summaries.size()) != layers_))
            throw std::invalid_argument("one of each layer is needed");
        hold<ListedLayer>(row, RowKind::lists, keys, layers);
        row.how = &how;
        row.steps = steps;
        row.summaries = std::move(summaries);
        row.summarized = std::move(summarized);
        if (!how.blocks) row.summaries.clear();
    }

    // Before a layer's queries, of `heads` heads, are there: what lists can tell of their candidates by then.
    // Needs no interpreter.
    void foresee(const KernelSet& set, int threads, int64_t layer, int64_t heads) {
        if (layer < 0 || layer >= layers_ || threads < 1) throw std::invalid_argument("there is no such layer");
        struct Foreseeing {
            const KernelSet& set;
            std::vector<std::pair<Listing*, PlannedRow*>> some;
            int threads;
            int64_t layer, heads;
        } work{set, {}, threads, layer, heads};
        for (const auto& row : rows_)
            if (row->layers[layer].kind == RowKind::lists)
                work.some.push_back({&row->working<Listing>(RowKind::lists), row.get()});
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
        PlannedRow& row = at(number);
        if (!row.work) throw std::invalid_argument("the row has read nothing");
        return row.work->touched();
    }

    // Every layer reads what it shares, or retrieves.
    void shares(int64_t number, nanobind::object keys, nanobind::list layers) {
        PlannedRow& row = at(number);
        row.how = &nanobind::cast<const SharedKeys&>(keys);
        hold<SharedLayer>(row, RowKind::shares, keys, layers);
    }

    // Every layer reads the keys that are left of its lists.
    void keeps(int64_t number, nanobind::object keys, nanobind::list layers) {
        PlannedRow& row = at(number);
        row.how = &nanobind::cast<const KeptKeys&>(keys);
        hold<KeptLayer>(row, RowKind::keeps, keys, layers);
    }

    // A row's queries go to `asked`, [heads, head_dim] a layer, the next layer's `stride` bytes on.
    void asks(int64_t number, uintptr_t asked, int64_t stride) {
        PlannedRow& row = at(number);
        if (row.where.count > 1 || stride < 0) throw std::invalid_argument("queries are noted of single rows");
        row.asked = reinterpret_cast<char*>(asked);
        row.asked_stride = stride;
    }

    // Stores the new keys and values and, if it `attends`, writes the attention of those rows that say how.
    // If `watched`, returns the share of the rows' time that went to choosing and learning, else 0. Needs no interpreter.
    double run(const KernelSet& set, int threads, int64_t layer, const Pool& pool, const NewRows& fresh,
               const Queries& queries, const Output& output, bool attends, bool follows, bool watched) {
        if (layer < 0 || layer >= layers_) throw std::invalid_argument("there is no layer " + std::to_string(layer));
        if (fresh.k)
            for (const auto& row : rows_) {
                if (row->layers[layer].kind == RowKind::resolves) continue;
                const BlockTable table = row->where.at(layer);
                for (int64_t i = 0; i < row->where.count; ++i)
                    store_row(pool, fresh, row->where.row + i, table, row->where.q_start + i);
            }
        Running all{set, some_, threads, watched};
        some_.clear();
        for (const auto& one : rows_) {
            PlannedRow& row = *one;
            if (!attends || row.layers[layer].kind == RowKind::elsewhere) continue;
            const StepRow& where = row.where;
            row.begin(layer,
                      row_of(threads, pool, queries, where.at(layer), where.row, where.q_start, output, where.count),
                      fresh);
            some_.push_back(&row);
        }
        if (some_.empty()) return 0;
        std::stable_partition(some_.begin(), some_.end(), [](const PlannedRow* row) { return row->keys >= kLong; });
        parallel_for(
            static_cast<int64_t>(some_.size()), threads,
            [](void* context, int64_t i) {
                const Running& all = *static_cast<const Running*>(context);
                PlannedRow& row = *all.some[i];  // what it gets does not depend on how many threads make it
                const bool alone = static_cast<int64_t>(all.some.size()) >= all.threads && row.keys < kLong;
                row.work->phases.begin(all.watched);
                row.work->run(all.set, alone ? 1 : all.threads);
            },
            &all, follows);
        double spent[Phases::count] = {};
        for (const PlannedRow* row : some_)
            for (int i = 0; i < Phases::count; ++i) spent[i] += row->work->phases.seconds(static_cast<Phases::Phase>(i));
        const double whole = spent[Phases::choosing] + spent[Phases::reading];
        return whole > 0 ? spent[Phases::choosing] / whole : 0;
    }

  private:
    static constexpr int64_t kLong = 8192;  // keys from which a row takes all threads by itself

    struct Running {
        const KernelSet& set;
        const std::vector<PlannedRow*>& some;
        int threads;
        bool watched;
    };

    PlannedRow& at(int64_t number) {
        if (number < 0 || number >= static_cast<int64_t>(rows_.size()))
            throw std::invalid_argument("there is no row " + std::to_string(number));
        return *rows_[number];
    }
    void check_layers(size_t count) const {
        if (static_cast<int64_t>(count) != layers_) throw std::invalid_argument("one call a layer is needed");
    }
    // A layer reads as `kind` says, or where its own window rules as ReadKeys say.
    template <class T>
    void hold(PlannedRow& row, RowKind kind, nanobind::object keys, nanobind::list layers) {
        check_layers(nanobind::len(layers));
        for (int64_t i = 0; i < layers_; ++i) {
            nanobind::handle layer = layers[i];
            if (nanobind::isinstance<ReadKeys>(layer))
                row.layers[i] = {RowKind::reads, &nanobind::cast<const ReadKeys&>(layer)};
            else row.layers[i] = {kind, &nanobind::cast<const T&>(layer)};
        }
        row.held = nanobind::make_tuple(keys, layers);
    }

    int64_t layers_, kv_heads_, block_size_;
    std::vector<std::unique_ptr<PlannedRow>> rows_;
    std::vector<PlannedRow*> some_;  // of the layer that runs
};

}  // namespace saccade
