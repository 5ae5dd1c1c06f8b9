"""A Kafka broker on loopback for tests, with its data on disk.

It is that of noida-db, a small server with Kafka's protocol, the deletion of records, new partitions and transactions
included; it saves its data within a second and at SIGTERM.
"""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from trainer_cases import free_port

DEADLINE = 600


class KafkaBroker:
    """A Kafka broker whose process can be ended, frozen and started again."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port = folder, free_port()
        self.address = f"127.0.0.1:{self.port}"
        self.start()
        self._admin = AdminClient({"bootstrap.servers": self.address, "log_level": 0})

    def start(self) -> None:
        program = Path(str(files("noida_db"))) / "noida-db"
        if not os.access(program, os.X_OK):
            program.chmod(0o755)
        command = [program, "start", "--only", "kafka", "--kafka-port", str(self.port), "--data-dir", self._folder]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        probe = AdminClient({"bootstrap.servers": self.address, "log_level": 0})
        wait_for(lambda: probe.list_topics(timeout=0.5).brokers)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal: SIGSTOP freezes the broker, SIGCONT resumes it, SIGTERM and SIGKILL end it."""
        self._process.send_signal(number)
        if number in (signal.SIGKILL, signal.SIGTERM):
            self._process.wait()

    def create(self, topic: str, partitions: int = 1) -> None:
        for done in self._admin.create_topics([NewTopic(topic, partitions, 1)]).values():
            done.result(DEADLINE)

    def add_partitions(self, topic: str, total: int) -> None:
        for done in self._admin.create_partitions([NewPartitions(topic, total)]).values():
            done.result(DEADLINE)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """Deletes the messages before an offset, as retention does."""
        for done in self._admin.delete_records([confluent_kafka.TopicPartition(topic, partition, offset)]).values():
            done.result(DEADLINE)

    def send_messages(self, topic: str, messages: Sequence[bytes], partition: int = 0) -> None:
        producer = confluent_kafka.Producer({"bootstrap.servers": self.address, "log_level": 0})
        for message in messages:
            producer.produce(topic, message, partition=partition)
        assert producer.flush(DEADLINE) == 0

    def send_transactions(self, topic: str, transactions: Sequence[tuple[bytes, bool]]) -> None:
        """Sends a message in each transaction, and commits or aborts it."""
        settings = {"bootstrap.servers": self.address, "transactional.id": "test", "log_level": 0}
        producer = confluent_kafka.Producer(settings)
        producer.init_transactions(DEADLINE)
        for message, commit in transactions:
            producer.begin_transaction()
            producer.produce(topic, message, partition=0)
            producer.flush(DEADLINE)
            producer.commit_transaction(DEADLINE) if commit else producer.abort_transaction(DEADLINE)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


@contextmanager
def kafka_broker(folder: Path) -> Iterator[KafkaBroker]:
    broker = KafkaBroker(folder)
    try:
        yield broker
    finally:
        broker.close()


def wait_for(happened: Callable[[], object]) -> None:
    end = time.monotonic() + DEADLINE
    while True:
        try:
            if happened():
                return
        except confluent_kafka.KafkaException:
            pass
        assert time.monotonic() < end, "the broker did not start"
