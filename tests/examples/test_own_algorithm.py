import example_programs


def test_own_algorithm(tmp_path):
    output = example_programs.run(example_programs.EXAMPLES / "own_algorithm.py", cwd=tmp_path)
    assert "my_star all_reduce of 4 ranks: 2 rounds, 6 messages" in output
    assert "The sum of the rows of 8 ranks: [[ 84.  92. 100.]]" in output
    assert "wrote own_algorithm.svg\n" in output
    assert (tmp_path / "own_algorithm.svg").read_text().startswith("<svg")
