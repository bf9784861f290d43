#include "cuda/ffi/dump.h"

#include "csrc/failure_report.h"
#include "cuda/ffi/call_site.h"

namespace jcoll::gpu {

std::string CountersText(const SignalPad& pad, uint32_t block, int num_ranks) {
  if (block >= kMaxBlocks) return "";
  std::string text = "\n  Signal pad of this rank, block " + std::to_string(block) +
                     ": launches ended " + std::to_string(pad.calls) + ", epoch " +
                     std::to_string(pad.epoch[block]) + ", exchanges by lines " +
                     std::to_string(pad.line_epoch[block]) + ", turns of plans by lines " +
                     std::to_string(pad.plan_lines[block]) + "; heard from (rank:epoch,lines read)";
  for (int rank = 0; rank < num_ranks; ++rank) {
    text += " " + std::to_string(rank) + ":" + std::to_string(pad.inbox[block][rank]) + "," +
            std::to_string(pad.lines_read[block][rank]);
  }
  return text + ".";
}

std::string LastCallsText(const std::vector<uint32_t>& calls) {
  std::string text = "\n  Last calls put on the stream of this device, or into its CUDA graph:";
  for (const uint32_t op_id : calls) text += "\n    " + WhereOf(op_id);
  return calls.empty() ? text + " none." : text;
}

std::string LastCallsJson(const std::vector<uint32_t>& calls) {
  std::vector<std::string> texts;
  for (const uint32_t op_id : calls) texts.push_back(WhereOf(op_id));
  return JsonTexts(texts);
}

std::string CountersJson(const SignalPad& pad, uint32_t block, int num_ranks) {
  if (block >= kMaxBlocks) return "null";
  std::string heard;
  for (int rank = 0; rank < num_ranks; ++rank) {
    heard += (rank > 0 ? ", " : "") +
             JsonObject({{"rank", std::to_string(rank)},
                         {"epoch", std::to_string(pad.inbox[block][rank])},
                         {"lines_read", std::to_string(pad.lines_read[block][rank])}});
  }
  return JsonObject({{"block", std::to_string(block)},
                     {"launches_ended", std::to_string(pad.calls)},
                     {"epoch", std::to_string(pad.epoch[block])},
                     {"exchanges_by_lines", std::to_string(pad.line_epoch[block])},
                     {"turns_of_plans_by_lines", std::to_string(pad.plan_lines[block])},
                     {"heard_from", "[" + heard + "]"}});
}

}  // namespace jcoll::gpu
