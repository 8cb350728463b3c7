// How Horovod's timeline is written, in place of its own: part of class TimelineWriter in timeline.cc.
//
// An event is text from the beginning, appended to what is to be written next by whoever has it to tell. A
// thread writes that down every hundredth of a second. Nobody waits for the disk, unless so much is unwritten
// that memory would suffer.

bool TimelineWriter::MayAppend(std::unique_lock<std::recursive_mutex>& guard) {
  const size_t most_bytes = 256 << 20;
  while (active() && healthy() && text_.size() > most_bytes) {
    guard.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    guard.lock();
  }
  if (!active() || !healthy()) {
    return false;
  }
  if (!is_new_file_) {
    text_ += ',';
    return true;
  }
  is_new_file_ = false;
  text_ += "[\n";
  AppendMetadata(0, "\"start_time_since_epoch_in_micros\":" +
                        std::to_string(start_time_since_epoch_utc_micros_));
  return true;
}

// The trace format calls a tensor a process, and says of each what it is called and where it is shown.
void TimelineWriter::AppendMetadata(int pid, const std::string& named) {
  const std::string number = std::to_string(pid);
  text_ += "{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": " + number;
  text_ += ", \"args\": {" + named + "}},\n";
  text_ += "{\"name\": \"process_sort_index\", \"ph\": \"M\", \"pid\": " + number;
  text_ += ", \"args\": {\"sort_index\": " + number + "}},\n";
}

void TimelineWriter::EnqueueWriteEvent(const std::string& tensor_name,
                                       char phase, const std::string& op_name,
                                       const std::string& args,
                                       long ts_micros) {
  std::unique_lock<std::recursive_mutex> guard(writer_mutex_);
  if (!MayAppend(guard)) {
    return;
  }
  auto& pid = tensor_table_[tensor_name];
  if (pid == 0) {
    pid = (int)tensor_table_.size();
    AppendMetadata(pid, "\"name\": \"" + tensor_name + "\"");
  }
  text_ += "{\"ph\": \"";
  text_ += phase;
  if (phase != 'E') {
    text_ += "\", \"name\": \"";
    text_ += op_name;
  }
  text_ += "\", \"ts\": ";
  text_ += std::to_string(ts_micros);
  text_ += ", \"pid\": ";
  text_ += std::to_string(pid);
  if (phase == 'X') {
    text_ += ", \"dur\": 0";
  }
  if (!args.empty()) {
    text_ += ", \"args\": {";
    text_ += args;
    text_ += '}';
  }
  text_ += '}';
}

void TimelineWriter::EnqueueWriteMarker(const std::string& name,
                                        long ts_micros) {
  std::unique_lock<std::recursive_mutex> guard(writer_mutex_);
  if (MayAppend(guard)) {
    text_ += "{\"ph\": \"i\", \"name\": \"" + name;
    text_ += "\", \"ts\": " + std::to_string(ts_micros) + ", \"s\": \"g\"}";
  }
}

// Leaves valid JSON: the bracket that ends it is written over by what comes next.
void TimelineWriter::WriteOut() {
  {
    std::lock_guard<std::recursive_mutex> guard(writer_mutex_);
    unwritten_.swap(text_);
  }
  if (unwritten_.empty()) {
    return;
  }
  if (unwritten_.front() != '[') {
    file_.seekp(-1, std::ios::cur);
  }
  unwritten_ += ']';
  file_.write(unwritten_.data(), unwritten_.size());
  file_.flush();
  unwritten_.clear();
  if (unwritten_.capacity() > (16 << 20)) {  // after the disk had stalled
    unwritten_.shrink_to_fit();
  }
}

void TimelineWriter::WriterLoop() {
  while (healthy()) {
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
    WriteOut();
    std::lock_guard<std::recursive_mutex> guard(writer_mutex_);
    if (!healthy()) {
      break;  // else a file that is begun now would keep this going, and who shuts down waiting
    }
    if (active() && !file_.good()) {
      LOG(ERROR) << "Error writing to the Horovod Timeline after it was "
                    "successfully opened, will stop writing the timeline.";
      active_.exchange(0);
    }
    if (pending_status_) {
      active_.exchange(0);  // closing a file may take long: nobody is to wait
      SetTimelineFile(PendingTimelineFile());
    }
  }
  WriteOut();
  std::lock_guard<std::recursive_mutex> guard(writer_mutex_);
  pending_status_ = false;  // for which another thread may wait
}
