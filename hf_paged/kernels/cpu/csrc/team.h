// Parallel loops on torch's threads, which stay together from one loop to the next.
//
// Entering and leaving a region of OpenMP costs microseconds, a loop of a team a few hundred nanoseconds, and a decoder
// step has a dozen loops a layer. The calling thread leads: it alone runs the code around the loops, while the others
// wait for the next one. Nothing waits for a thread that never came: a leader alone does all the work.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <exception>
#include <thread>

namespace hf_paged {

// How many items a free thread takes: neighbours, whose memory is read in one go, and ever fewer of them so that all
// threads are done at the same time; or, where the largest items come first, one.
enum class Take { neighbours, one };

class Team {
 public:
  // Runs lead() on the calling thread, and the loops that it comes to on `max_threads` of torch's threads.
  template <class Lead>
  static void run(const Lead& lead, int64_t max_threads = INT64_MAX) {
    int64_t threads = torch::stable::get_num_threads();
    if (threads > max_threads) threads = max_threads;
    if (threads <= 1 || current()) return lead();
    Team team((int)threads);
    const void* caller = &current();
    std::exception_ptr error;  // kept from torch, which would replace it by one of its own
    torch::stable::parallel_for(0, threads, 1, [&](int64_t, int64_t) {
      if (&current() != caller) return team.follow();
      if (team.is_over_.load(std::memory_order_relaxed)) return;
      const Leadership leadership(team);
      try {
        lead();
      } catch (...) {
        error = std::current_exception();
      }
    });
    if (error) std::rethrow_exception(error);
  }

  // Runs work(item) for each of `count` items: in the calling thread's team, else in one for this loop alone.
  template <class Work>
  static void loop(int64_t count, const Work& work, Take take = Take::neighbours) {
    const auto lead = [&] {
      if (count > 1 && count < MAX_COUNT && current()) return current()->share(count, work, take);
      for (int64_t item = 0; item < count; item++) work(item);
    };
    run(lead, count);
  }

 private:
  static constexpr int BITS = 24;
  static constexpr int64_t MAX_COUNT = (int64_t)1 << BITS;
  static constexpr uint64_t MASK = MAX_COUNT - 1;

  // What a waiting thread does: spins, and after a while lets others have its processor.
  class Pause {
   public:
    void operator()() {
      if (++count_ > SPINS) return std::this_thread::yield();
#if defined(__x86_64__) || defined(__i386__)
      __builtin_ia32_pause();
#endif
    }

   private:
    static constexpr int SPINS = 4000;
    int count_ = 0;
  };

  class Leadership {
   public:
    explicit Leadership(Team& team) : team_(team) { current() = &team; }
    ~Leadership() {
      current() = nullptr;
      team_.is_over_.store(true, std::memory_order_release);
    }

   private:
    Team& team_;
  };

  explicit Team(int size) : size_(size) {}

  // The team that the calling thread leads, or null.
  static Team*& current() {
    static thread_local Team* team = nullptr;
    return team;
  }

  template <class Work>
  void share(int64_t count, const Work& work, Take take) {
    work_ = &work;
    call_ = [](const void* w, int64_t item) { (*(const Work*)w)(item); };
    take_.store(take, std::memory_order_relaxed);
    num_done_.store(0, std::memory_order_relaxed);
    number_++;
    state_.store((uint64_t)number_ << (2 * BITS) | (uint64_t)count << BITS, std::memory_order_release);
    current() = nullptr;  // a loop within an item is the item's own
    take_items();
    current() = this;
    for (Pause pause; num_done_.load(std::memory_order_acquire) < count;) pause();
    if (error_) std::rethrow_exception(error_);
  }

  void follow() {
    uint16_t seen = 0;
    for (Pause pause; !is_over_.load(std::memory_order_acquire); pause()) {
      if (state_.load(std::memory_order_acquire) >> (2 * BITS) == seen) continue;
      seen = take_items();
      pause = Pause();
    }
  }

  // Which loop it is, how many items it has and which is next change together, so that who comes too late for one loop
  // takes nothing or a share of the next. Returns the loop that has no more.
  uint16_t take_items() {
    uint64_t state = state_.load(std::memory_order_acquire);
    for (;;) {
      const int64_t count = (state >> BITS) & MASK, first = state & MASK, left = count - first;
      if (left <= 0) return (uint16_t)(state >> (2 * BITS));
      const bool several = left > 2 * size_ && take_.load(std::memory_order_relaxed) == Take::neighbours;
      const int64_t taken = several ? left / (2 * size_) : 1;
      if (!state_.compare_exchange_weak(state, state + taken, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      try {
        for (int64_t item = first; item < first + taken; item++) call_(work_, item);
      } catch (...) {
        if (!has_failed_.exchange(true)) error_ = std::current_exception();
      }
      num_done_.fetch_add(taken, std::memory_order_acq_rel);
      state = state_.load(std::memory_order_acquire);
    }
  }

  const int size_;
  uint16_t number_ = 0;  // of the loop
  const void* work_ = nullptr;
  void (*call_)(const void*, int64_t) = nullptr;
  std::exception_ptr error_;
  std::atomic<bool> has_failed_{false};
  std::atomic<Take> take_{Take::neighbours};
  alignas(64) std::atomic<uint64_t> state_{0};
  alignas(64) std::atomic<int64_t> num_done_{0};
  alignas(64) std::atomic<bool> is_over_{false};
};

}  // namespace hf_paged
