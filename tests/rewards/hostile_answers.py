"""Answers that are made, or happen, to hang, crash or bloat a scorer: of each kind a few."""

DEPTH = 10_000
MEGABYTE = 2**20


def boxed(*contents: str) -> list[str]:
    return [f"\\boxed{{{content}}}" for content in contents]


def nested() -> list[str]:
    pairs = (("{", "}"), ("\\left(", "\\right)"), ("\\sqrt{", "}"), ("\\frac{1}{", "}"), ("-", ""))
    found = [f"{opening * DEPTH}1{closing * DEPTH}" for opening, closing in pairs]
    return [*boxed(*found), "\\boxed{" * DEPTH, "1+(" * DEPTH + "1" + ")" * DEPTH]


def hostile_answers() -> list[str]:
    n = 20_000
    chains = ("+1", "^1", ",1", "!", "\\\\", "\\cup \\{1\\}", " 1")
    texts = (
        "a",
        "\n",
        "\\",
        "$",
        "\\boxed{",
        "$1$ ",
        "final answer is ",
        "数",
        "</think>",
        "**1 ",
        "1 or ",
        "\\boxed{}",
    )
    specials = ("\0" * 1000, "\ud800", "1\ud83d", "\x1b[2J", "%s%s%s%n", "{:>999999999}")
    code = ("__import__('os').system('exit')", "raise SystemExit", "os.kill(0, 9)", "factorial(10**9)")
    undefined = ("\\frac{1}{0}", "\\infty - \\infty", "0^{-1}", "zoo", "nan", "1e99999999")
    rows = "\\\\".join(["&".join(["x"] * 20)] * 20)
    powers = ("9^{9^{9}}", "0.5^{0.5^{0.5^{0.5}}}", "x^{x^{x^{x^{x}}}}", "2^{10^9}", "1.5^{-10^{10}}")
    factorials = (f"{10**5}!", f"{10**10}!", "((99!)!)!", f"\\binom{{{10**9}}}{{{10**8}}}")
    sums = ("\\sum_{n=1}^{1000000000} \\frac{1}{n}", "\\int e^{x^x} dx", "\\lim_{x \\to 0} x^{x^{x^x}}")
    polynomials = ("(x+1)^{100000000}", "(a+b+c+d+e+f)^{60}", "(x+y)^{1000} - 1")
    digits = ("9" * 100_000, "0." + "3" * 100_000, "1" * 30_000 + "/" + "7" * 30_000)
    precisions = ("\\sin(10^{10^{7}})", "10^{10^8} + 0.1", "0.1^{10^9}")
    latex = ("\\frac" * n, "\\left" * n, "\\begin{pmatrix}" * n, f"\\begin{{vmatrix}}{rows}\\end{{vmatrix}}")
    sets = ("\\{" + ",".join(map(str, range(3000))) + "\\}", ",".join(["x"] * n), "(" + "1," * n + "1)")
    commands = ("\\input{/etc/passwd}", "\\def\\x{\\x}\\x", "\\loop\\repeat")
    return [
        *boxed(*powers, *factorials, *sums, *polynomials, *digits, *precisions, *latex, *sets, *commands),
        *("**".join(["9"] * 4), "^".join(["9"] * 5)),
        *nested(),
        *boxed(*("1" + link * DEPTH for link in chains)),
        *(text * (MEGABYTE // len(text)) for text in texts),
        "word " * (MEGABYTE // 5) + "\\boxed{7}",
        *boxed("1+" * (MEGABYTE // 2) + "1"),
        *specials,
        *code,
        *boxed(*specials, *code, *undefined),
        *("$$" + "a" * n, "$1$ and " * n, "1,000" * n, "-" * n + "1", "answer" * n + "$"),
    ]
