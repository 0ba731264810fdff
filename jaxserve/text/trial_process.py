"""The program of `text.trial`: it compiles each grammar that it is sent, and may crash.

It answers once a compilation has ended, with an error or without: the server then compiles the grammar itself. The
script imports nothing of jaxserve, so that it starts quickly.

A question is a length, whether it is GBNF, and the text. An answer is a length and the Lark form of GBNF, else nothing;
or, with the sign bit of the length set, the reason why GBNF could not be read.
"""

import resource
import signal
import struct
import sys
import threading

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, grammar_from


def main(seconds: float, stack_bytes: int, memory_bytes: int, max_items_in_row: int, max_lexer_states: int) -> None:
    """Serves until its input ends. `seconds` are of processor time, for each grammar."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if sys.platform == "linux":  # elsewhere the limit is refused or ignored
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        bounded = memory_bytes if most == resource.RLIM_INFINITY else min(memory_bytes, most)
        resource.setrlimit(resource.RLIMIT_AS, (bounded, most))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also in the middle of native code
    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # meant for the server, which drains, and then ends this process
        signal.signal(number, signal.SIG_IGN)
    threading.stack_size(stack_bytes)
    vocabulary = LLTokenizer("byte")
    limits = LLParserLimits(max_items_in_row=max_items_in_row, max_lexer_states=max_lexer_states, verbose_errors=False)

    def attempt(text: str, is_gbnf: bool, answer: list[bytes]) -> None:
        converted = ""
        if is_gbnf:
            try:
                converted = text = grammar_from("grammar", text)
            except ValueError as error:
                words = str(error).encode()
                answer += [struct.pack("<i", ~len(words)), words]
                return
        LLMatcher(vocabulary, text, log_level=0, limits=limits).compute_bitmask()
        data = converted.encode()
        answer += [struct.pack("<i", len(data)), data]

    while header := sys.stdin.buffer.read(5):
        size, is_gbnf = struct.unpack("<i?", header)
        text, answer = sys.stdin.buffer.read(size).decode(), []
        signal.setitimer(signal.ITIMER_PROF, seconds)
        worker = threading.Thread(target=attempt, args=(text, is_gbnf, answer))
        worker.start()
        worker.join()
        signal.setitimer(signal.ITIMER_PROF, 0)
        if not answer:
            sys.exit(3)  # a defect, which the thread has printed
        sys.stdout.buffer.write(b"".join(answer))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]), *map(int, sys.argv[2:]))
