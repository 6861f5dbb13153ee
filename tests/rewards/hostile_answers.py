"""Answers that are made, or happen, to hang, crash or bloat a scorer: of each kind a few."""

DEPTH = 10_000
MEGABYTE = 2**20


def boxed(*contents: str) -> list[str]:
    return [f"\\boxed{{{content}}}" for content in contents]


def nested() -> list[str]:
    pairs = (("{", "}"), ("\\left(", "\\right)"), ("\\{", "\\}"), ("\\sqrt{", "}"), ("\\frac{1}{", "}"), ("-", ""))
    found = []
    for opening, closing in pairs:
        found += boxed(f"{opening * DEPTH}1{closing * DEPTH}")
    return [*found, "\\boxed{" * DEPTH, "\\text{" * DEPTH + "1" + "}" * DEPTH, "1+(" * DEPTH + "1" + ")" * DEPTH]


def hostile_answers() -> dict[str, list[str]]:
    """Responses by kind."""
    n = 20_000
    chains = ("+1", "^1", ",1", "\\cdot x", "!", "\\\\", "<1", "\\cup \\{1\\}", " 1")
    texts = ("a", "\n", "\\", "$", "\\boxed{", "$1$ ", "1 ", "final answer is ", "数")
    specials = ("\0" * 1000, "1\x002", "\ud800", "1\ud83d", "\x1b[2J", "\u202e7", "%s%s%s%n", "{:>999999999}")
    code = ("__import__('os').system('exit')", "raise SystemExit", "os.kill(0, 9)", "#7", "E**E**9", "factorial(10**9)")
    undefined = ("\\frac{1}{0}", "\\infty - \\infty", "0^{-1}", "\\ln 0", "oo-oo", "zoo", "nan", "1e99999999")
    rows = "\\\\".join(["&".join(["x"] * 20)] * 20)
    return {
        "power tower": [
            *boxed(
                "9^{9^{9}}", "0.5^{0.5^{0.5^{0.5}}}", "x^{x^{x^{x^{x}}}}", "\\frac{7}{3}^{\\frac{7}{3}^{\\frac{7}{3}}}"
            ),
            *("**".join(["9"] * 4), "^".join(["9"] * 5)),
        ],
        "huge power": boxed("2^{10^9}", "1.5^{-10^{10}}", "x^{10^{10^{10}}}", "\\sqrt[1000000000]{7^{1000000000}}"),
        "factorial": boxed(f"{10**5}!", f"{10**10}!", "((99!)!)!", "x!!!!!!", f"\\binom{{{10**9}}}{{{10**8}}}"),
        "sum": boxed("\\sum_{n=1}^{1000000000} \\frac{1}{n}", "\\prod_{n=1}^{1000000000} (x+n)"),
        "integral": boxed("\\int e^{x^x} dx", "\\int \\sqrt{\\tan x}^{\\pi} dx", "\\lim_{x \\to 0} x^{x^{x^x}}"),
        "polynomial": boxed("(x+1)^{100000000}", "(a+b+c+d+e+f)^{60}", "(x+y)^{1000} - 1", "x^{10^6} = 1"),
        "digits": boxed("9" * 100_000, "0." + "3" * 100_000, "1" * 30_000 + "/" + "7" * 30_000),
        "precision": boxed("\\sin(10^{10^{7}})", "10^{10^8} + 0.1", "0.1^{10^9}", "\\ln(10^{10^{10}})"),
        "nested": nested(),
        "chain": [*boxed(*("1" + link * DEPTH for link in chains)), *("1" + link * DEPTH for link in ("+1", "*1"))],
        "a megabyte": [
            *(text * (MEGABYTE // len(text)) for text in texts),
            "word " * (MEGABYTE // 5) + "\\boxed{7}",
            *boxed("x" * MEGABYTE, "1+" * (MEGABYTE // 2) + "1"),
        ],
        "special characters": [*specials[::2], *boxed(*specials[1::2])],
        "code": [*code[::2], *boxed(*code[1::2])],
        "undefined": [*boxed(*undefined[::2]), *(f"${value}$" for value in undefined[1::2])],
        "regular expressions": [
            "$$" + "a" * n,
            "\\[" + "a" * n,
            "$1$ and " * n,
            "1,000" * n,
            "-" * n + "1",
            "1 " * n + "x",
        ],
        "anchors": ["answer" * n + "$", "final answer" + " is" * n, "\\boxed{1} and " * n, "\\boxed{{{" * n],
        "LaTeX": boxed("\\frac" * n, "\\left" * n, "\\begin{pmatrix}" * n, "_" * n, "\\begin{cases}" * 100),
        "matrices": boxed(
            "\\begin{pmatrix}" + "&".join(["1"] * 10_000) + "\\end{pmatrix}",
            f"\\begin{{vmatrix}}{rows}\\end{{vmatrix}}",
        ),
        "sets": boxed("\\{" + ",".join(map(str, range(3000))) + "\\}", ",".join(["x"] * n), "(" + "1," * n + "1)"),
        "commands": boxed("\\input{/etc/passwd}", "\\def\\x{\\x}\\x", "\\catcode`\\$=0", "\\loop\\repeat"),
    }
