"""Memory a program needs, from its text."""

from __future__ import annotations

from rm_abstract.worker import ir_memory

PROGRAM = """rmir 1
input %0 "x" : f32[4,8]
weight %1 "w" : bf16[8]
literal %2 : f32[] = 0000803f
%3 = cast(%1) : f32[8]
%4 = mul(%0, %3) : f32[4,8]
%5 = relu(%4) : f32[4,8]
%6 = add(%5, %2) : f32[4,8]
return %6
"""


def test_weights_of_several_programs_are_counted_once() -> None:
    other = PROGRAM.replace('"w" : bf16[8]', '"v" : bf16[8]')
    assert ir_memory.weights([PROGRAM, PROGRAM]) == 16
    assert ir_memory.weights([PROGRAM, other]) == 32
    assert ir_memory.weights([]) == 0


def test_values_count_from_where_they_are_made_to_their_last_use() -> None:
    # The input (128) all the time; %3 (32) and %4; then %4 and %5, %5 and %6.
    assert ir_memory.most_at_once(PROGRAM) == 128 + 2 * 128
    twice = PROGRAM.replace("add(%5, %2)", "add(%5, %4)")  # %4 lives until then
    assert ir_memory.most_at_once(twice) == 128 + 3 * 128
    unused = PROGRAM.replace("return %6", "return %4")
    assert ir_memory.most_at_once(unused) == 128 + 3 * 128


def test_what_is_returned_unchanged_needs_itself() -> None:
    text = 'rmir 1\ninput %0 "x" : i64[2]\nreturn %0\n'
    assert ir_memory.most_at_once(text) == 16
