// Implements Timeline: formats events as lines of JSON, which a writer thread appends
// to the file. See timeline.h.
#include "engine/eager/timeline.h"

#include <stdio_ext.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cerrno>
#include <cstring>

#include "base/json.h"

namespace ringjax {
namespace {

// The closing bracket is written after every batch and overwritten by the next batch,
// so that the file is complete JSON at any time.
constexpr char kClose[] = "\n]\n";
// An entry in the list of events that tells the writer thread to begin the next file.
constexpr char kNext[] = "";
// The placeholder event of a file without events. The first batch overwrites it.
constexpr char kEmpty[] =
    ",\n{\"ph\":\"i\",\"name\":\"NOTHING YET: this rank has ended no collective while "
    "the timeline was open. Only rank 0 writes one, of the operations that it takes "
    "part "
    "in\",\"s\":\"g\",\"pid\":0,\"ts\":0}";

std::string Upper(std::string_view text) {
  std::string out(text);
  std::transform(out.begin(), out.end(), out.begin(),
                 [](unsigned char c) { return static_cast<char>(std::toupper(c)); });
  return out;
}

}  // namespace

Result<std::shared_ptr<Timeline>> Timeline::Open(const std::string& path,
                                                 bool mark_rounds,
                                                 uint64_t most_bytes) {
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr)
    return Status(Code::kInternal, "the timeline " + path +
                                       " cannot be written: " + std::strerror(errno));
  return std::shared_ptr<Timeline>(new Timeline(path, file, mark_rounds, most_bytes));
}

Timeline::Timeline(std::string path, std::FILE* file, bool mark_rounds,
                   uint64_t most_bytes)
    : path_(std::move(path)),
      file_(file),
      mark_rounds_(mark_rounds),
      most_bytes_(most_bytes / 2),
      start_(Clock::now()),
      epoch_us_(std::chrono::duration_cast<std::chrono::microseconds>(
                    std::chrono::system_clock::now().time_since_epoch())
                    .count()) {
  BeginFile();
  std::fputs(kEmpty, file_);
  std::fputs(kClose, file_);
  std::fflush(file_);
  writer_ = std::thread([this] { Write(); });
}

Timeline::~Timeline() {
  Close();
  if (file_ != nullptr) std::fclose(file_);
}

void Timeline::Close() {
  std::thread writer;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    writer.swap(writer_);
  }
  changed_.notify_one();
  if (writer.joinable()) writer.join();
}

void Timeline::Round() {
  if (!mark_rounds_) return;
  const std::lock_guard lock(mutex_);
  Add("{\"ph\":\"i\",\"name\":\"CYCLE_START\",\"s\":\"g\",\"pid\":0," + Stamp() + "}");
}

void Timeline::Submitted(const Row& row, int rank) {
  const std::lock_guard lock(mutex_);
  RowState* state = StateOf(row);
  if (state->phase == Phase::kRunning) return;  // a rank submits the next operation
  if (state->phase == Phase::kIdle) {
    Begin(*state, "NEGOTIATE_" + Upper(row.op), Stamp());
    state->phase = Phase::kNegotiating;
  }
  Add("{\"ph\":\"X\",\"name\":\"" + std::to_string(rank) +
      "\",\"dur\":0,\"pid\":" + std::to_string(state->number) + "," + Stamp() + "}");
}

void Timeline::Runs(const Row& row) {
  const std::lock_guard lock(mutex_);
  RowState* state = StateOf(row);
  if (state->phase == Phase::kNegotiating) End(*state, Stamp());
  Begin(*state, Upper(row.op), Stamp());
  state->phase = Phase::kRunning;
}

void Timeline::Ended(const Row& row, std::string_view what) {
  EndRow(row, "\"operation\":" + Quoted(what));
}

void Timeline::Failed(const Row& row, std::string_view why) {
  EndRow(row, "\"error\":" + Quoted(why));
}

void Timeline::EndRow(const Row& row, const std::string& arguments) {
  const std::lock_guard lock(mutex_);
  RowState* state = StateOf(row);
  if (state->phase == Phase::kIdle) return;  // the begin event is in an earlier file
  End(*state, Stamp(), arguments);
  state->phase = Phase::kIdle;
}

// Adds a call of a compiled program or of JAX. Ignores operations of eager lanes, which
// the lanes report by the functions above, and calls that began before the timeline was
// opened. The name of a call of JAX is that of its processes.
void Timeline::OnEvent(const Event& event) {
  if (event.lane == Lane::kNamed || event.entered < start_) return;
  const std::lock_guard lock(mutex_);
  const std::string_view name(event.name, event.length), op = event.op;
  const std::string set =
      event.set == 0 ? "" : "process set " + std::to_string(event.set);
  const RowState* state = event.lane == Lane::kJax
                              ? StateOf({name, op, ""})
                              : StateOf({set, op, name}, " (compiled)");
  const bool agreed = event.agreed != Clock::time_point();
  Begin(*state, "NEGOTIATE_" + Upper(op), Stamp(event.entered));
  Add("{\"ph\":\"X\",\"name\":\"0\",\"dur\":0,\"pid\":" +
      std::to_string(state->number) + "," + Stamp(event.entered) + "}");
  if (agreed) {
    End(*state, Stamp(event.agreed));
    Begin(*state, Upper(op), Stamp(event.agreed));
  }
  std::string arguments;
  if (event.outcome == Code::kOk)
    arguments = "\"bytes\":" + std::to_string(event.bytes) +
                ",\"algorithm\":" + Quoted(event.algorithm) +
                ",\"seq\":" + std::to_string(event.sequence);
  else
    arguments = "\"error\":\"it failed\"";
  End(*state, Stamp(event.done), arguments);
}

Timeline::RowState* Timeline::StateOf(const Row& row, std::string_view suffix) {
  std::string title(row.op);
  if (!row.name.empty()) title.append(".").append(row.name);
  if (!row.set.empty()) title.append(" (").append(row.set).append(")");
  title.append(suffix);
  auto [found, fresh] = rows_.try_emplace(title);
  RowState& state = found->second;
  if (fresh) {
    state.number = static_cast<int>(rows_.size());
    NameRow(title, state);
  }
  return &state;
}

void Timeline::NameRow(const std::string& title, const RowState& state) {
  const std::string number = std::to_string(state.number);
  Push("{\"ph\":\"M\",\"name\":\"process_name\",\"pid\":" + number +
       ",\"args\":{\"name\":" + Quoted(title) + "}}");
  Push("{\"ph\":\"M\",\"name\":\"process_sort_index\",\"pid\":" + number +
       ",\"args\":{\"sort_index\":" + number + "}}");
}

void Timeline::Begin(const RowState& state, std::string_view name,
                     const std::string& stamp) {
  Add("{\"ph\":\"B\",\"name\":" + Quoted(name) +
      ",\"pid\":" + std::to_string(state.number) + "," + stamp + "}");
}

void Timeline::End(const RowState& state, const std::string& stamp,
                   std::string_view arguments) {
  std::string event =
      "{\"ph\":\"E\",\"pid\":" + std::to_string(state.number) + "," + stamp;
  if (!arguments.empty()) event.append(",\"args\":{").append(arguments).append("}");
  Add(event + "}");
}

std::string Timeline::Stamp(Clock::time_point when) const {
  const auto us = std::chrono::duration_cast<std::chrono::microseconds>(when - start_);
  return "\"ts\":" + std::to_string(us.count());
}

void Timeline::Add(std::string event) {
  if (stopping_) return;
  if (bytes_ > most_bytes_) {
    bytes_ = 0;
    Push(kNext);
    for (auto& [title, state] : rows_) {
      NameRow(title, state);
      // The new file has no begin event of this phase, so it must not get an end event.
      state.phase = Phase::kIdle;
    }
  }
  Push(std::move(event));
}

void Timeline::Push(std::string event) {
  bytes_ += event.size() + 2;
  events_.push_back(std::move(event));
  if (events_.size() == 1) changed_.notify_one();
}

// -- the writer thread ---------------------------------------------------------------

void Timeline::Write() {
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [this] { return stopping_ || !events_.empty(); });
    if (events_.empty()) return;
    std::vector<std::string> batch;
    batch.swap(events_);
    lock.unlock();
    Append(batch);
    lock.lock();
  }
}

void Timeline::BeginFile() {
  // Viewers use this time to align the traces of several programs.
  std::fprintf(
      file_,
      "[\n{\"ph\":\"M\",\"name\":\"start_time_since_epoch_in_micros\",\"pid\":0,"
      "\"args\":{\"start_time_since_epoch_in_micros\":%lld}}",
      static_cast<long long>(epoch_us_));
  end_ = std::ftell(file_);
}

void Timeline::Append(const std::vector<std::string>& batch) {
  if (file_ != nullptr) std::fseek(file_, end_, SEEK_SET);
  for (const std::string& event : batch) {
    if (event == kNext) BeginNext();
    if (file_ == nullptr) return;
    if (event == kNext) continue;
    std::fputs(",\n", file_);
    std::fputs(event.c_str(), file_);
  }
  const long end = std::ftell(file_);
  std::fputs(kClose, file_);
  if (std::fflush(file_) == 0) {
    end_ = end;
  } else {
    // A full disk must not stop the training, so the events of this batch are dropped.
    __fpurge(file_);
    std::clearerr(file_);
    std::fseek(file_, end_, SEEK_SET);
    std::fputs(kClose, file_);
    std::fflush(file_);
  }
  // Cut off the rest of kEmpty, which may be longer than the batch that has overwritten
  // it.
  [[maybe_unused]] const int cut = ftruncate(fileno(file_), std::ftell(file_));
}

void Timeline::BeginNext() {
  if (file_ == nullptr) return;
  std::fputs(kClose, file_);
  std::fclose(file_);
  std::rename(path_.c_str(), (path_ + ".1").c_str());
  file_ = std::fopen(path_.c_str(), "we");
  if (file_ != nullptr) BeginFile();
}

}  // namespace ringjax
