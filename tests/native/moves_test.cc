#include "csrc/moves.h"

#include <map>
#include <utility>

#include "tests/native/ranks.h"

namespace {

using jcoll::MoveList;
using ranks::Buffer;

std::vector<int32_t> Iota(int64_t count, int32_t first) {
  std::vector<int32_t> values(count);
  for (int64_t i = 0; i < count; ++i) values[i] = first + static_cast<int32_t>(i);
  return values;
}

TEST(TrafficCountsReadsAndWrites) {
  char bytes[4] = {};
  MoveList moves;
  moves.Begin(100);  // A reduction of 3 into 2.
  for (int i = 0; i < 3; ++i) moves.AddSource(bytes);
  for (int i = 0; i < 2; ++i) moves.AddDestination(bytes);
  moves.AddCopy(bytes, bytes + 1, 10);
  moves.AddZero(bytes, 7);
  EXPECT_EQ(moves.size(), 3);
  EXPECT_EQ(moves.traffic_nbytes(), 500 + 20 + 7);
  moves.Clear();
  EXPECT_EQ(moves.size(), 0);
  EXPECT_EQ(moves.traffic_nbytes(), 0);
}

TEST(NothingToDoMakesNoMove) {
  char bytes[4] = {};
  MoveList moves;
  moves.AddCopy(bytes, bytes + 1, 0);
  moves.AddCopy(bytes, bytes, 4);
  moves.AddZero(bytes, 0);
  EXPECT_EQ(moves.size(), 0);
  EXPECT_EQ(moves.Cut(4096).size(), 0);
}

TEST(PiecesCoverEveryByteOnce) {
  char bytes[1];
  for (int64_t traffic : {1, 4096, 50000, 1 << 19, 1 << 30}) {
    MoveList moves;
    const std::vector<int64_t> sizes = {1, 4095, 4096, 4097, 1000000, (1 << 20) + 3};
    for (int64_t size : sizes) {
      moves.Begin(size);
      for (int i = 0; i < 7; ++i) moves.AddSource(bytes);
      moves.AddDestination(bytes);
    }
    std::map<int, int64_t> covered;  // Pieces of one move come in order, without gaps.
    for (const MoveList::Piece& piece : moves.Cut(traffic)) {
      EXPECT_EQ(piece.begin, covered[piece.move]);
      EXPECT_EQ(piece.begin % 4096, 0);
      EXPECT(piece.end > piece.begin);
      EXPECT((piece.end - piece.begin) * 8 <= std::max<int64_t>(traffic, 8 * 4096));
      covered[piece.move] = piece.end;
    }
    for (size_t i = 0; i < sizes.size(); ++i) EXPECT_EQ(covered[static_cast<int>(i)], sizes[i]);
  }
}

TEST(PiecesInAnyOrderEqualTheWhole) {
  const int64_t count = 30001;
  Buffer a(Iota(count, 5)), b(Iota(count, 100), 4), c(Iota(count, -7), 3);
  Buffer sums(count * 4), sums_too(count * 4, 1), copy(count * 4), zeros(Iota(count, 1), 2);
  MoveList moves;
  moves.Begin(count * 4);
  for (Buffer* source : {&a, &b, &c}) moves.AddSource(source->data());
  for (Buffer* destination : {&sums, &sums_too}) moves.AddDestination(destination->data());
  moves.AddCopy(b.data(), copy.data(), count * 4);
  moves.AddZero(zeros.data(), count * 4);
  const auto reduce = jcoll::GetReduceFn(jcoll::DType::kS32, jcoll::ReduceOp::kSum);
  auto pieces = moves.Cut(60000);
  EXPECT(pieces.size() > 10);
  for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
    moves.Run(*piece, reduce, 4, /*stream=*/piece->begin % 8192 == 0);
  }
  std::vector<int32_t> expected(count);
  for (int32_t i = 0; i < count; ++i) expected[i] = 98 + 3 * i;
  EXPECT(sums.Values<int32_t>() == expected);
  EXPECT(sums_too.Values<int32_t>() == expected);
  EXPECT(copy.Values<int32_t>() == Iota(count, 100));
  EXPECT(zeros.Values<int32_t>() == std::vector<int32_t>(count, 0));
  for (Buffer* buffer : {&a, &b, &c, &sums, &sums_too, &copy, &zeros}) {
    EXPECT(buffer->GuardsAreIntact());
  }
}

}  // namespace
