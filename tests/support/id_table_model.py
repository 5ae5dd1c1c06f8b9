"""Id tables in plain dictionaries and loops: the oracle of their tests."""

from collections import Counter
from collections.abc import Mapping, Sequence

from cowrec.sparse_opt import IdTableConfig

WORD = (1 << 64) - 1


def splitmix(state: int) -> int:
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & WORD
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & WORD
    return state ^ (state >> 31)


def hash_of(id: int, feature: int) -> int:
    return splitmix((id + (feature + 1) * 0x9E3779B97F4A7C15) & WORD)


class SegmentModel:
    """One segment of one table; rows are numbered from 0."""

    def __init__(self, config: IdTableConfig, capacity: int, number: int) -> None:
        self.config, self.capacity, self.number = config, capacity, number
        self.records: dict[int, list] = {}  # row -> [key, last seen, count]
        self.row_of: dict[tuple[int, int], int] = {}
        self.freed: list[tuple[int, int]] = []  # row, batch
        self.used = self.hand = 0
        self.counted: Counter = Counter()  # (key, pane)
        self.counters: Counter = Counter()

    def expired(self, row: int, clock: int) -> bool:
        expire_after = self.config.expire_after
        return expire_after > 0 and self.records[row][1] + expire_after < clock

    def free(self, row: int, batch: int) -> None:
        del self.row_of[self.records.pop(row)[0]]
        self.freed.append((row, batch))

    def valid_row(self, key: tuple[int, int], clock: int) -> int | None:
        row = self.row_of.get(key)
        return None if row is None or self.expired(row, clock) else row

    def assign(self, occurrences: Sequence[tuple[tuple[int, int], int]], clock: int, batch: int) -> tuple[list, list]:
        """Rows (None: out of vocabulary) of (key, time) in the order of the batch, and new rows as (row, key)."""
        self.sweep(clock, batch)
        self.counters["occurrences"] += len(occurrences)
        rows: list[int | None] = []
        candidates: dict[tuple[int, int], list[int]] = {}  # key -> times that are not late
        for key, time in occurrences:
            row = self.valid_row(key, clock)
            rows.append(row)
            if row is not None:
                record = self.records[row]
                record[1:] = max(record[1], time), min(record[2] + 1, 65535)
                continue
            times = candidates.setdefault(key, [])
            if self.config.expire_after and time + self.config.expire_after < clock:
                self.counters["late"] += 1
            else:
                times.append(time)
        wanted, given = [], {}
        for key, times in candidates.items():
            if not times:
                continue
            admitted = self.admits(key, len(times), clock)
            self.counters["below_threshold"] += not admitted
            if key in self.row_of:
                self.counters["expired"] += 1
                if admitted:
                    given[key] = self.row_of[key]
                    self.records[given[key]] = [key, max(times), len(times)]
                else:
                    self.free(self.row_of[key], batch)
            elif admitted:
                wanted.append(key)
        self.make_room(len(wanted), clock, batch)
        for key in wanted:
            row = self.take(batch)
            if row is None:
                self.counters["refused"] += 1
                continue
            given[key] = row
            self.row_of[key] = row
            self.records[row] = [key, max(candidates[key]), len(candidates[key])]
        self.counters["admitted"] += len(given)
        rows = [given.get(key) if row is None else row for (key, _), row in zip(occurrences, rows, strict=True)]
        self.counters["unknown"] += rows.count(None)
        return rows, [(given[key], key) for key in candidates if key in given]

    def sweep(self, clock: int, batch: int) -> None:
        if not self.config.expire_after or (batch + self.number) % 16:
            return
        for _ in range(min(max(64, -(-self.capacity // 64)), self.used)):
            row = self.hand % self.used
            self.hand = row + 1
            if row in self.records and self.expired(row, clock):
                self.free(row, batch)
                self.counters["expired"] += 1

    def admits(self, key: tuple[int, int], count: int, clock: int) -> bool:
        admission = self.config.admission
        if admission.kind == "none":
            return True
        pane = clock // -(-admission.window // 4) if admission.window else 0
        self.counted[key, pane] += count
        return sum(self.counted[key, p] for p in range(pane - 3, pane + 1)) >= admission.threshold

    def make_room(self, wanted: int, clock: int, batch: int) -> None:
        if self.config.when_full == "refuse" or not wanted:
            return
        room = self.capacity - len(self.records)
        required = max(self.capacity // 64, min(6 * wanted, self.capacity // 4), 1)
        if room >= required:
            return
        by_count = self.config.when_full == "least_frequent"

        def age(row: int) -> tuple[int, int, int]:
            _, last_seen, count = self.records[row]
            return count * (by_count and not self.expired(row, clock)), last_seen, row

        order = sorted(self.records, key=age)
        evicted = sorted(order[: required - room + self.capacity // 64])
        for row in evicted:
            self.free(row, batch)
        self.counters["evicted"] += len(evicted)

    def take(self, batch: int) -> int | None:
        if self.freed and self.freed[0][1] + 4 <= batch:
            return self.freed.pop(0)[0]
        if self.used < self.capacity:
            self.used += 1
            return self.used - 1
        return None


class IdTablesModel:
    """IdTables of one process, for admission "none" and, with exact counts, "count"."""

    def __init__(
        self,
        configs: Mapping[str, IdTableConfig],
        features: Sequence[str],
        *,
        max_segments: int,
        min_segment_capacity: int,
        timed: bool,
    ) -> None:
        self.features, self.timed, self.batch, self.clock = features, timed, 0, 0
        segments = [min(max_segments, max(1, config.capacity // min_segment_capacity)) for config in configs.values()]
        positions = sorted(
            ((j * max_segments // count + t * max_segments // len(segments)) % max_segments, t, j)
            for t, count in enumerate(segments)
            for j in range(count)
        )
        self.segments: list[list[SegmentModel]] = [[None] * count for count in segments]  # type: ignore[list-item]
        self.order = [(t, j) for _, t, j in positions]
        self.capacity = [-(-config.capacity // count) for config, count in zip(configs.values(), segments, strict=True)]
        for number, (t, j) in enumerate(self.order):
            self.segments[t][j] = SegmentModel(list(configs.values())[t], self.capacity[t], number)
        self.feature_of = {
            feature: (t, number)
            for t, config in enumerate(configs.values())
            for number, feature in enumerate(config.features)
        }

    def segment(self, feature: str, id: int) -> tuple[int, int, tuple[int, int]] | None:
        """Table, segment and key of an id; None where no table translates it."""
        if feature not in self.feature_of or id in (0, 1):
            return None
        t, number = self.feature_of[feature]
        return t, (hash_of(id, number) >> 32) * len(self.segments[t]) >> 32, (id, number)

    def first_row(self, t: int, j: int) -> int:
        return 2 + j * self.capacity[t]

    def assign(self, bags: Sequence[Sequence[tuple[int, int]]]) -> tuple[list[int], list[tuple]]:
        """Rows of each feature's (id, time), one list after the other, and new rows as (table, row, id, feature)."""
        self.batch += 1
        if self.timed:
            self.clock = max([self.clock, *(time for bag in bags for _, time in bag)])
        else:
            self.clock = self.batch
        rows: list[int] = []
        sent: dict[tuple[int, int], list] = {key: [] for key in self.order}
        for feature, bag in zip(self.features, bags, strict=True):
            for id, time in bag:
                where = self.segment(feature, id)
                if where:
                    sent[where[:2]].append((len(rows), where[2], time if self.timed else self.clock))
                rows.append(id)
        new_rows = []
        for (t, j), occurrences in sent.items():
            pairs = [(key, time) for _, key, time in occurrences]
            segment_rows, given = self.segments[t][j].assign(pairs, self.clock, self.batch)
            for (at, _, _), row in zip(occurrences, segment_rows, strict=True):
                rows[at] = 0 if row is None else self.first_row(t, j) + row
            new_rows += [(t, self.first_row(t, j) + row, *key) for row, key in given]
        return rows, new_rows

    def rows_of(self, bags: Sequence[Sequence[int]]) -> list[int]:
        rows = []
        for feature, bag in zip(self.features, bags, strict=True):
            for id in bag:
                where = self.segment(feature, id)
                if where:
                    row = self.segments[where[0]][where[1]].valid_row(where[2], self.clock)
                    id = 0 if row is None else self.first_row(*where[:2]) + row
                rows.append(id)
        return rows

    def owners(self, t: int) -> dict[int, tuple[int, int]]:
        """(id, feature) of rows, of ids that are expired and not yet freed too."""
        found = {}
        for j, segment in enumerate(self.segments[t]):
            found |= {self.first_row(t, j) + row: record[0] for row, record in segment.records.items()}
        return found

    def entries(self, t: int) -> set[tuple]:
        """(id, feature, row, last seen, count) of the ids that are not expired."""
        return {
            (*key, self.first_row(t, j) + row, seen, count)
            for j, segment in enumerate(self.segments[t])
            for row, (key, seen, count) in segment.records.items()
            if not segment.expired(row, self.clock)
        }

    def counters(self, t: int) -> Counter:
        total: Counter = Counter(resident=sum(len(segment.records) for segment in self.segments[t]))
        for segment in self.segments[t]:
            total.update(segment.counters)
        return total
