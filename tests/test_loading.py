"""What is brought up in threads: once in a process, and what fails there is told where it is used."""

from threading import Event

from hf_static_kv import loading


def test_a_part_is_loaded_once_and_waited_for():
    goes_on, runs = Event(), []

    def part():
        goes_on.wait(60)
        runs.append("ran")

    threads = [loading._thread(part) for _ in range(3)]
    assert runs == []
    goes_on.set()
    loading._thread(part).join()
    assert runs == ["ran"]
    assert threads == [threads[0]] * 3


def test_an_error_is_left_to_the_place_of_use(recwarn):
    def part():
        raise ImportError("not installed")

    loading._thread(part).join()
    assert not recwarn.list  # pytest would show a thread's own exception


def test_without_a_gpu_or_without_triton_nothing_is_raised():
    loading.load_triton()
    loading.wait_for_triton()
