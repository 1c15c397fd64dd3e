// Operations that move values between ranks. Where ranks share memory, each wrote its part of a
// value in its place, and a gather is no more than a barrier; elsewhere the link moves the bytes.
#pragma once

#include <cstdint>

namespace ts {

struct OpRecord;
struct Plan;
struct StepRecord;
struct TeamRecord;
struct Worker;

/// Waits at the beginning of a step until no rank reads what it is about to write.
void meet_ranks(Worker& worker);

/// Waits for the threads of all ranks of a team; they share memory.
void meet_team(Worker& worker, const TeamRecord& team);

void run_gather(Worker& worker, const OpRecord& op);
void run_send(Worker& worker, const OpRecord& op);
void run_receive(Worker& worker, const OpRecord& op);

/// Whether a gather begins with a barrier, so that the operation before it needs none.
bool begins_with_barrier(const OpRecord& op);

/// Makes room for packed parts; throws std::bad_alloc.
void make_room_for_collectives(Plan& plan, const StepRecord& step);

}  // namespace ts
