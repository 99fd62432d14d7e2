// FlexPrefill's blocks of all query heads at once (saccade/methods/flexprefill/cpu.py): everything but the sums and
// products of line_groups.h, which differ between instruction sets. A head is a task.
#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "bindings.h"
#include "half.h"
#include "shares.h"
#include "threads.h"

namespace nb = nanobind;

namespace saccade {
namespace {

// Of key and query blocks of block_size, on a grid anchored at position 0. `marks` has a bit for each key block, in
// `words` words a query block: [heads, q_blocks, words]. `offsets` [heads * q_blocks + 1] count them.
struct FlexChoice {
    Attention attention;
    const float* pooled;  // mean keys [kv_heads, k_blocks, head_dim]
    int64_t rows, block_size, k_blocks, q_blocks, known, least, most, words;
    double gamma, tau;
    bool flatten;
    uint8_t* aware;  // [heads]: query-aware ones
    uint64_t* marks;
    int64_t* offsets;
};

struct MarkLists {
    int threads;
    int64_t lists, words;
    const uint64_t* marks;   // [lists, words]
    const int64_t* offsets;  // [lists + 1]
    int32_t* indices;
};

template <class Body>
void each(int64_t count, int threads, const Body& body, bool follows = true) {
    parallel_for(
        count, threads, [](void* context, int64_t i) { (*static_cast<const Body*>(context))(i); },
        const_cast<Body*>(&body), follows);
}

class Choice {
  public:
    Choice(const KernelSet& set, const FlexChoice& call)
        : set_(set), c_(call), a_(call.attention), first_(a_.q_start / c_.block_size) {}

    void run() {
        const int64_t heads = a_.heads, blocks = c_.k_blocks;
        columns_.resize(heads * blocks);
        slashes_.resize(heads * blocks);
        set_.line_groups({a_, c_.rows, c_.block_size, blocks, columns_.data(), slashes_.data()});
        each(heads, a_.threads, [&](int64_t head) {
            c_.aware[head] = divergence(head) < c_.tau;
            if (!c_.aware[head]) mark_lines(head);
        });
        std::vector<int32_t> aware;
        for (int64_t head = 0; head < heads; ++head)
            if (c_.aware[head]) aware.push_back(static_cast<int32_t>(head));
        const int64_t pairs = c_.q_blocks * blocks, count = static_cast<int64_t>(aware.size());
        const int64_t together = std::max<int64_t>(1, std::min(count, kShares / pairs));
        if (count) shares_.resize(together * pairs);
        for (int64_t at = 0; at < count; at += together) {
            const int64_t now = std::min(together, count - at);
            set_.pooled_shares({a_, c_.pooled, c_.block_size, c_.q_blocks, blocks, now, &aware[at], shares_.data()});
            each(now, a_.threads, [&](int64_t i) { mark_pairs(aware[at + i], &shares_[i * pairs]); });
        }
        c_.offsets[0] = 0;
        for (int64_t list = 0; list < heads * c_.q_blocks; ++list) c_.offsets[list + 1] += c_.offsets[list];
    }

  private:
    static constexpr int64_t kShares = 1 << 24;  // block pairs of query-aware heads at work together

    template <class T>
    T* take(char*& at, int64_t count) const {
        T* piece = reinterpret_cast<T*>(at);
        at += (count * sizeof(T) + 63) / 64 * 64;
        return piece;
    }

    float value(const void* row, int64_t c) const {
        return a_.storage == Storage::bf16 ? from_half(static_cast<const uint16_t*>(row)[c])
                                           : static_cast<const float*>(row)[c];
    }

    // Square root of the Jensen-Shannon divergence between pooled and true block weights of the rows (Alg. 2).
    double divergence(int64_t head) const {
        const int64_t d = a_.head_dim, blocks = c_.k_blocks, width = a_.storage == Storage::bf16 ? 2 : 4;
        std::vector<float> mean(d), guess(blocks);
        for (int64_t row = a_.q_len - c_.rows; row < a_.q_len; ++row) {
            const char* q = static_cast<const char*>(a_.q) + (head * a_.q_head_stride + row * a_.q_row_stride) * width;
            for (int64_t c = 0; c < d; ++c) mean[c] += value(q, c);
        }
        for (float& x : mean) x /= static_cast<float>(c_.rows);
        const float* keys = c_.pooled + head / (a_.heads / a_.kv_heads) * blocks * d;
        double total = 0;
        float max = -INFINITY;
        for (int64_t block = 0; block < blocks; ++block) {
            float dot[16] = {};
            for (int64_t c = 0; c < d; c += 16)
                for (int i = 0; i < 16; ++i) dot[i] += mean[c + i] * keys[block * d + c + i];
            float sum = 0;
            for (float x : dot) sum += x;
            guess[block] = sum * a_.scale;
            max = std::max(max, guess[block]);
        }
        for (float& x : guess) total += x = std::exp(x - max);
        const auto weigh = [](double p) { return p == 0 ? 0.0 : p * std::log(p); };
        const float* columns = &columns_[head * blocks];
        double sum = 0;
        for (int64_t block = 0; block < blocks; ++block) {
            const double p = guess[block] / total, q = columns[block] / static_cast<double>(c_.rows);
            sum += weigh(p) + weigh(q) - 2 * weigh((p + q) / 2);
        }
        return std::sqrt(sum < 0 ? 0.0 : sum / 2);
    }

    // Alg. 3 on blocks: a pair is needed from the gamma on that wants its column or one of the two groups of distances
    // that its diagonal lies in.
    void mark_lines(int64_t head) const {
        const int64_t blocks = c_.k_blocks;
        char* at = static_cast<char*>(thread_scratch(5 * (blocks + 16) * 8));
        auto *scratch = take<uint64_t>(at, 2 * blocks);
        double *vertical = take<double>(at, blocks), *groups = take<double>(at, blocks);
        double* row = take<double>(at, blocks);
        needed_row(&columns_[head * blocks], blocks, vertical, scratch);
        needed_row(&slashes_[head * blocks], blocks, groups, scratch);
        for (int64_t distance = blocks - 1; distance > 0; --distance)
            groups[distance] = std::min(groups[distance], groups[distance - 1]);
        std::reverse(groups, groups + blocks);
        for (int64_t j = 0; j < c_.q_blocks; ++j) {
            const double* diagonal = groups + blocks - 1 - (first_ + j);
            for (int64_t block = 0; block <= first_ + j; ++block)
                row[block] = std::min(vertical[block], diagonal[block]);
            mark_row(head, j, row);
        }
    }

    // Alg. 4: the heaviest pairs by pooled attention, but by true weights in the query blocks of the rows.
    void mark_pairs(int64_t head, const float* shares) const {
        const int64_t blocks = c_.k_blocks, queries = c_.q_blocks;
        const int64_t causal = c_.flatten ? queries * (first_ + 1) + queries * (queries - 1) / 2 : 0;
        const int64_t longest = std::max(causal, blocks);
        char* at = static_cast<char*>(thread_scratch(3 * (longest + 16) * 8 + (causal + blocks + 32) * 8));
        auto* scratch = take<uint64_t>(at, 2 * longest);
        double *pairs = take<double>(at, longest), *own = take<double>(at, blocks);
        auto* mass = take<float>(at, causal);
        if (c_.flatten) {  // pairs beyond a block's own hold nothing
            float* to = mass;
            for (int64_t j = 0; j < queries; ++j) to = std::copy_n(shares + j * blocks, first_ + j + 1, to);
            needed_row(mass, causal, pairs, scratch);
        }
        needed_row(&columns_[head * blocks], blocks, own, scratch);
        const double* next = pairs;
        for (int64_t j = 0; j < queries; ++j) {
            const double* row = next;
            if (j >= queries - c_.known) row = own;
            else if (!c_.flatten) needed_row(shares + j * blocks, blocks, pairs, scratch);
            if (c_.flatten) next += first_ + j + 1;
            mark_row(head, j, row);
        }
    }

    // What gamma wants of a query block's key blocks, no fewer and no more than the budget, the first and the last
    // always: FlexPrefill._keep.
    void mark_row(int64_t head, int64_t q_block, const double* needed) const {
        const int64_t last = first_ + q_block, list = head * c_.q_blocks + q_block;
        const double limit = std::max(c_.gamma, 1e-9);
        uint64_t* marks = c_.marks + list * c_.words;
        int64_t count = 0;
        for (int64_t word = 0; word < c_.words; ++word) {
            uint64_t bits = 0;
            const int64_t from = word * 64, stop = std::min(last + 1, from + 64);
            for (int64_t block = from; block < stop; ++block)
                bits |= static_cast<uint64_t>(needed[block] < limit) << (block - from);
            if (word == 0) bits |= 1;
            if (word == last / 64) bits |= 1ull << last % 64;
            marks[word] = bits;
            count += __builtin_popcountll(bits);
        }
        const int64_t least = std::min(c_.least, last + 1);
        if (count > c_.most) count = mark_first(needed, last, c_.most, marks);
        else if (count < least) count = mark_first(needed, last, least, marks);
        c_.offsets[list + 1] = count;
    }

    // The first `count` in the order in which a growing gamma would add them, the first and the last ahead of all.
    static int64_t mark_first(const double* needed, int64_t last, int64_t count, uint64_t* marks) {
        std::vector<std::pair<double, int64_t>> order(last + 1);
        for (int64_t block = 0; block <= last; ++block)
            order[block] = {block == 0 || block == last ? -1.0 : needed[block], block};
        if (count <= last) std::nth_element(order.begin(), order.begin() + count, order.end());
        std::fill(marks, marks + last / 64 + 1, 0);
        for (int64_t i = 0; i < count; ++i) marks[order[i].second / 64] |= 1ull << order[i].second % 64;
        marks[0] |= 1;
        marks[last / 64] |= 1ull << last % 64;
        int64_t marked = 0;
        for (int64_t word = 0; word <= last / 64; ++word) marked += __builtin_popcountll(marks[word]);
        return marked;
    }

    const KernelSet& set_;
    const FlexChoice& c_;
    const Attention& a_;
    const int64_t first_;  // query block
    std::vector<float> columns_, slashes_, shares_;
};

void flex_choice(const KernelSet& set, int threads, const Pool& pool, const BlockTable& table, const Queries& queries,
                 const FlexChoice& choice) {
    FlexChoice call = choice;
    call.attention = attention(threads, pool, table, queries);
    const int64_t end = queries.q_start + queries.q_len, size = call.block_size;
    if (call.rows > queries.q_len || call.rows > size)
        throw std::invalid_argument("rows=" + std::to_string(call.rows) + " are more than a block of " +
                                    std::to_string(size) + " or than the " + std::to_string(queries.q_len) +
                                    " of the call");
    if (128 % size) throw std::invalid_argument("block_size=" + std::to_string(size) + " must divide 128");
    if (call.q_blocks != (end - 1) / size - queries.q_start / size + 1 || call.k_blocks < (end - 1) / size + 1 ||
        call.words != (call.k_blocks + 63) / 64)
        throw std::invalid_argument("q_blocks, k_blocks and words do not fit rows that end at " + std::to_string(end));
    nb::gil_scoped_release release;
    Choice(set, call).run();
}

// The numbers of the bits set in each list's words, rising.
void list_marks(const MarkLists& call) {
    nb::gil_scoped_release release;
    constexpr int64_t kLists = 256;  // of a task
    each((call.lists + kLists - 1) / kLists, call.threads, [&](int64_t task) {
        for (int64_t list = task * kLists; list < std::min(call.lists, (task + 1) * kLists); ++list) {
            int32_t* to = call.indices + call.offsets[list];
            for (int64_t word = 0; word < call.words; ++word)
                for (uint64_t bits = call.marks[list * call.words + word]; bits; bits &= bits - 1)
                    *to++ = static_cast<int32_t>(word * 64 + __builtin_ctzll(bits));
        }
    }, false);
}

}  // namespace

void bind_flex_choice(nb::module_& m, KernelSetClass& set) {
    bind_struct<FlexChoice>(
        m, "FlexChoice",
        {field<&FlexChoice::pooled>("pooled"), field<&FlexChoice::rows>("rows").at_least(1),
         field<&FlexChoice::block_size>("block_size").at_least(1), field<&FlexChoice::k_blocks>("k_blocks").at_least(1),
         field<&FlexChoice::q_blocks>("q_blocks").at_least(1), field<&FlexChoice::known>("known"),
         field<&FlexChoice::least>("least"), field<&FlexChoice::most>("most"), field<&FlexChoice::words>("words"),
         field<&FlexChoice::gamma>("gamma"), field<&FlexChoice::tau>("tau"), field<&FlexChoice::flatten>("flatten"),
         field<&FlexChoice::aware>("aware"), field<&FlexChoice::marks>("marks"),
         field<&FlexChoice::offsets>("offsets")});
    bind_struct<MarkLists>(m, "MarkLists",
                           {field<&MarkLists::threads>("threads").at_least(1), field<&MarkLists::lists>("lists"),
                            field<&MarkLists::words>("words"), field<&MarkLists::marks>("marks"),
                            field<&MarkLists::offsets>("offsets"), field<&MarkLists::indices>("indices")});
    set.def("flex_choice", &flex_choice);
    m.def("list_marks", &list_marks);
}

}  // namespace saccade
