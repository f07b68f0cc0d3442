// Build index arrays of datasets: sample boundaries, blends, and a faster numpy shuffle.
//
// helpers.py has an equivalent of every function; tests require equal arrays.
// Compile with -ffp-contract=off: the compiler must not contract a product of doubles and the
// subtraction after it to an fma, otherwise blends differ between processors.

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <random>
#include <stdexcept>
#include <vector>

namespace py = pybind11;

namespace {

template <typename T>
using Array = py::array_t<T, py::array::c_style>;

constexpr int64_t kPrefetchAhead = 24;  // array entries between a prefetch and the use

// Return the start of each sample: row b is (position in document_idx, token offset).
//
// Sample b starts seq_length tokens after sample b-1.  With the extra token (the last label) the
// position is that of the document with the first token of the sample, without it that of the
// document with the token before.  An empty document has no row, except for row 0 = (0, 0).
template <typename Id>
py::array build_sample_idx(const Array<int32_t>& sizes, const Array<int32_t>& document_idx,
                           int64_t seq_length, int64_t num_epochs, int64_t tokens_per_epoch,
                           bool drop_last_partial_sequence, int add_extra_token_to_sequence) {
    if (seq_length < 1) throw std::invalid_argument("seq_length must be at least 1");
    const int64_t extra = add_extra_token_to_sequence ? 1 : 0;
    const int64_t back = 1 - extra;
    const int64_t usable = std::max<int64_t>(num_epochs * tokens_per_epoch - extra, 0);
    const int64_t num_samples =
        (usable + (drop_last_partial_sequence ? 0 : seq_length - 1)) / seq_length;

    Array<Id> result(std::vector<py::ssize_t>{num_samples + 1, 2});
    Id* out = result.mutable_data();
    const int32_t* size_of = sizes.data();
    const int32_t* documents = document_idx.data();
    const int64_t num_documents = document_idx.size();
    const uint64_t num_sizes = static_cast<uint64_t>(sizes.size());
    bool in_range = true;
    int64_t row = 1;
    {
        py::gil_scoped_release release;
        out[0] = out[1] = 0;
        int64_t start = 0;  // position of the first token of document k
        int64_t target = std::min(seq_length, usable) - back;
        for (int64_t k = 0; k < num_documents && row <= num_samples; ++k) {
            // documents are in random order: without a prefetch each size is a cache miss
            const int64_t ahead = std::min(k + kPrefetchAhead, num_documents - 1);
            __builtin_prefetch(size_of + documents[ahead]);
            const int32_t id = documents[k];
            if (static_cast<uint64_t>(id) >= num_sizes) {
                in_range = false;
                break;
            }
            const int64_t end = start + size_of[id];
            while (target < end && row <= num_samples) {
                out[2 * row] = static_cast<Id>(k);
                out[2 * row + 1] = static_cast<Id>(target - start + back);
                ++row;
                target = std::min(row * seq_length, usable) - back;
            }
            start = end;
        }
    }
    if (!in_range) throw std::out_of_range("the document index names a document that is not there");
    if (row <= num_samples)
        throw std::invalid_argument("the documents hold fewer tokens than the epochs ask for");
    return std::move(result);
}

// Random target lengths of samples: max_length, or with probability short_seq_prob a shorter one.
// With short_seq_prob > 0 each length takes exactly one value from the random generator.
class TargetLengths {
   public:
    TargetLengths(int64_t max_length, double short_seq_prob, uint32_t seed)
        : random_(seed),
          max_length_(max_length),
          ratio_(short_seq_prob > 0 ? std::llround(1.0 / short_seq_prob) : 0) {}

    int64_t next() {
        if (ratio_ == 0) return max_length_;
        const int64_t drawn = random_();
        return drawn % ratio_ == 0 ? 2 + drawn % (max_length_ - 1) : max_length_;
    }

   private:
    std::mt19937 random_;
    const int64_t max_length_, ratio_;
};

constexpr int32_t kLongestSentence = 512;  // a document with a longer sentence is skipped

// Return shuffled rows (first sentence, sentence after the last, target length), one per sample.
// See helpers.build_mapping.
template <typename Id>
py::array build_mapping(const Array<int64_t>& docs, const Array<int32_t>& sizes,
                        int64_t num_epochs, int64_t max_num_samples, int64_t max_seq_length,
                        double short_seq_prob, uint32_t seed, int64_t min_num_sent) {
    using Row = std::array<Id, 3>;
    std::vector<Row> rows;
    const int64_t* first_of = docs.data();
    const int32_t* size_of = sizes.data();
    const int64_t num_documents = docs.size() - 1;
    for (int64_t d = 0; d <= num_documents; ++d)
        if (first_of[d] < (d ? first_of[d - 1] : 0) || first_of[d] > sizes.size())
            throw std::out_of_range("the documents name a sentence that is not there");
    {
        py::gil_scoped_release release;
        TargetLengths targets(max_seq_length, short_seq_prob, seed);
        const auto is_long = [](int32_t size) { return size > kLongestSentence; };
        for (int64_t epoch = 0; epoch < num_epochs; ++epoch) {
            const int64_t before = static_cast<int64_t>(rows.size());
            if (before >= max_num_samples) break;
            for (int64_t d = 0; d < num_documents; ++d) {
                const int64_t begin = first_of[d], end = first_of[d + 1];
                if (end - begin < min_num_sent || std::any_of(size_of + begin, size_of + end, is_long))
                    continue;
                int64_t target = targets.next(), first = begin, length = 0;
                for (int64_t next = begin + 1; next <= end; ++next) {
                    length += size_of[next - 1];
                    const bool is_full =
                        length >= target && end - next > 1 && next - first >= min_num_sent;
                    if (!is_full && next < end) continue;
                    rows.push_back({Id(first), Id(next), Id(target)});
                    target = targets.next();
                    first = next;
                    length = 0;
                }
            }
            if (static_cast<int64_t>(rows.size()) == before) break;  // no epoch would add a sample
        }
        std::mt19937_64 random(uint64_t{seed} + 1);
        for (size_t i = rows.size(); i > 1; --i) std::swap(rows[i - 1], rows[random() % i]);
    }
    Array<Id> result(std::vector<py::ssize_t>{static_cast<py::ssize_t>(rows.size()), 3});
    if (!rows.empty()) std::copy_n(rows[0].data(), 3 * rows.size(), result.mutable_data());
    return std::move(result);
}

void check_blend(const Array<int16_t>& dataset_index, const Array<int64_t>& dataset_sample_index,
                 int64_t num_weights, int64_t num_datasets, int64_t size) {
    if (num_weights < num_datasets || dataset_index.size() < size ||
        dataset_sample_index.size() < size)
        throw std::invalid_argument("the arrays of a blend are shorter than its size");
}

// Assign sample i to the dataset with the largest deficit, weight * max(i, 1) - samples taken; in
// a tie to the first of them.
void build_blending_indices(Array<int16_t> dataset_index, Array<int64_t> dataset_sample_index,
                            const Array<double>& weights, int32_t num_datasets, int64_t size,
                            bool /*verbose*/) {
    check_blend(dataset_index, dataset_sample_index, weights.size(), num_datasets, size);
    int16_t* chosen = dataset_index.mutable_data();
    int64_t* position = dataset_sample_index.mutable_data();
    const double* weight = weights.data();
    std::vector<double> taken(num_datasets, 0.0);  // integers, exact in a double up to 2^53

    py::gil_scoped_release release;
    for (int64_t i = 0; i < size; ++i) {
        const double drawn = static_cast<double>(std::max<int64_t>(i, 1));
        int32_t best = 0;
        double most = weight[0] * drawn - taken[0];
        for (int32_t d = 1; d < num_datasets; ++d) {
            const double deficit = weight[d] * drawn - taken[d];
            if (deficit > most) {
                most = deficit;
                best = d;
            }
        }
        chosen[i] = static_cast<int16_t>(best);
        position[i] = static_cast<int64_t>(taken[best]);
        taken[best] += 1.0;
    }
}

// The same with weights = sizes / sum(sizes); a dataset drops out when all its samples are taken.
void build_exhaustive_blending_indices(Array<int16_t> dataset_index,
                                       Array<int64_t> dataset_sample_index,
                                       const Array<int64_t>& sizes, int32_t num_datasets) {
    const int64_t* count = sizes.data();
    int64_t total = 0;
    for (int32_t d = 0; d < num_datasets; ++d) total += count[d];
    check_blend(dataset_index, dataset_sample_index, sizes.size(), num_datasets, total);
    int16_t* chosen = dataset_index.mutable_data();
    int64_t* position = dataset_sample_index.mutable_data();
    std::vector<double> weight(num_datasets), taken(num_datasets, 0.0);
    std::vector<int32_t> left;
    for (int32_t d = 0; d < num_datasets; ++d) {
        weight[d] = static_cast<double>(count[d]) / static_cast<double>(total);
        if (count[d] > 0) left.push_back(d);
    }

    py::gil_scoped_release release;
    for (int64_t i = 0; i < total; ++i) {
        const double drawn = static_cast<double>(std::max<int64_t>(i, 1));
        size_t best = 0;
        double most = weight[left[0]] * drawn - taken[left[0]];
        for (size_t n = 1; n < left.size(); ++n) {
            const double deficit = weight[left[n]] * drawn - taken[left[n]];
            if (deficit > most) {
                most = deficit;
                best = n;
            }
        }
        const int32_t d = left[best];
        chosen[i] = static_cast<int16_t>(d);
        position[i] = static_cast<int64_t>(taken[d]);
        taken[d] += 1.0;
        if (static_cast<int64_t>(taken[d]) == count[d]) left.erase(left.begin() + best);
    }
}

// MT19937 generator that continues from numpy's state: 624 words and the number of used ones.
class MersenneTwister {
   public:
    MersenneTwister(uint32_t* key, int used) : key_(key), used_(used) { temper(used_); }

    uint32_t next() {
        if (used_ == kWords) {
            advance();
            used_ = 0;
            temper(0);
        }
        return tempered_[used_++];
    }

    int used() const { return used_; }

   private:
    static constexpr int kWords = 624, kShift = 397;

    void advance() {
        for (int i = 0; i < kWords; ++i) {
            const uint32_t y =
                (key_[i] & 0x80000000u) | (key_[i + 1 < kWords ? i + 1 : 0] & 0x7fffffffu);
            const int other = i + kShift < kWords ? i + kShift : i + kShift - kWords;
            key_[i] = key_[other] ^ (y >> 1) ^ (-(y & 1u) & 0x9908b0dfu);
        }
    }

    void temper(int from) {
        for (int i = from; i < kWords; ++i) {
            uint32_t y = key_[i];
            y ^= y >> 11;
            y ^= (y << 7) & 0x9d2c5680u;
            y ^= (y << 15) & 0xefc60000u;
            tempered_[i] = y ^ (y >> 18);
        }
    }

    uint32_t* key_;
    int used_;
    std::array<uint32_t, kWords> tempered_;
};

// Shuffle at most 2**32 entries in place, exactly like numpy.random.RandomState.shuffle.
//
// Swap partners do not depend on the data, so they are sampled in batches and prefetched.
template <typename T>
int shuffle(Array<T> values, Array<uint32_t> key, int used) {
    if (key.size() != 624 || used < 0 || used > 624)
        throw std::invalid_argument("not the state of an MT19937");
    if (values.size() > (int64_t{1} << 32)) throw std::invalid_argument("too many entries");
    T* x = values.mutable_data();
    MersenneTwister random(key.mutable_data(), used);
    int64_t i = values.size() - 1;

    py::gil_scoped_release release;
    std::array<uint32_t, 64> partner;
    while (i > 0) {
        const int batch = static_cast<int>(std::min<int64_t>(i, partner.size()));
        for (int drawn = 0; drawn < batch;) {
            const uint32_t largest = static_cast<uint32_t>(i - drawn);
            const uint32_t mask = 0xffffffffu >> __builtin_clz(largest);
            const uint32_t value = random.next() & mask;
            partner[drawn] = value;
            __builtin_prefetch(x + value, 1);
            drawn += value <= largest;  // reject a value above the largest
        }
        for (int n = 0; n < batch; ++n, --i) std::swap(x[i], x[partner[n]]);
    }
    return random.used();
}

}  // namespace

PYBIND11_MODULE(helpers_cpp, m) {
    m.doc() = "Index arrays of datasets; see helpers.py for what each function means.";
    const auto sample_args = [&](const char* name, auto function) {
        m.def(name, function, py::arg("sizes").noconvert(), py::arg("document_idx").noconvert(),
              py::arg("seq_length"), py::arg("num_epochs"), py::arg("tokens_per_epoch"),
              py::arg("drop_last_partial_sequence") = true,
              py::arg("add_extra_token_to_sequence") = 1);
    };
    sample_args("build_sample_idx_int32", &build_sample_idx<int32_t>);
    sample_args("build_sample_idx_int64", &build_sample_idx<int64_t>);
    const auto mapping_args = [&](const char* name, auto function) {
        m.def(name, function, py::arg("docs").noconvert(), py::arg("sizes").noconvert(),
              py::arg("num_epochs"), py::arg("max_num_samples"), py::arg("max_seq_length"),
              py::arg("short_seq_prob"), py::arg("seed"), py::arg("min_num_sent"));
    };
    mapping_args("build_mapping_uint32", &build_mapping<uint32_t>);
    mapping_args("build_mapping_uint64", &build_mapping<uint64_t>);
    m.def("build_blending_indices", &build_blending_indices, py::arg("dataset_index").noconvert(),
          py::arg("dataset_sample_index").noconvert(), py::arg("weights"), py::arg("num_datasets"),
          py::arg("size"), py::arg("verbose") = false);
    m.def("build_exhaustive_blending_indices", &build_exhaustive_blending_indices,
          py::arg("dataset_index").noconvert(), py::arg("dataset_sample_index").noconvert(),
          py::arg("sizes"), py::arg("num_datasets"));
    const auto shuffle_args = [&](auto function) {
        m.def("shuffle", function, py::arg("values").noconvert(), py::arg("key").noconvert(),
              py::arg("used"));
    };
    shuffle_args(&shuffle<int32_t>);
    shuffle_args(&shuffle<uint32_t>);
    shuffle_args(&shuffle<int64_t>);
}
