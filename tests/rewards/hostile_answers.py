"""Answers that are made, or happen, to hang, crash or bloat a scorer."""

DEPTH = 10_000
MEGABYTE = 2**20


def hostile_answers() -> dict[str, str]:
    """Responses by name."""
    found = {}

    def add(kind: str, *answers: str) -> None:
        for number, answer in enumerate(answers):
            found[f"{kind} {number}"] = answer

    def boxed(*contents: str) -> list[str]:
        return [f"\\boxed{{{content}}}" for content in contents]

    bases = ("2", "9", "99", "0.5", "x", "\\pi", "-3", "\\frac{7}{3}")
    for height in (3, 4, 6):
        add(f"power tower of {height}", *boxed(*("^{".join([base] * height) + "}" * (height - 1) for base in bases)))
    add("plain power tower", *("**".join(["9"] * n) for n in (3, 4, 5)), *("^".join(["9"] * n) for n in (3, 4, 5)))
    exponents = ("10^9", "10^{100}", "-10^{10}", "10^{10^{10}}")
    add("huge power", *boxed(*(f"{base}^{{{exponent}}}" for base in ("2", "1.5", "x") for exponent in exponents)))
    add("root of a huge power", *boxed(f"\\sqrt{{7^{{{10**9}}}}}", f"\\sqrt[{10**9}]{{7^{{{10**9}}}}}"))
    add("factorial", *boxed(*(f"{n}!" for n in (10**5, 10**7, 10**10, 10**30)), "((99!)!)!", "(10^9)!", "x!!!!!!"))
    add("binomial", *boxed(*(f"\\binom{{{10**k}}}{{{10**k // 2}}}" for k in (4, 7, 9, 20))))
    add("sum", *boxed(*(f"\\sum_{{n=1}}^{{{10**9}}} {term}" for term in ("\\frac{1}{n}", "n^n", "n!"))))
    add("product", *boxed(*(f"\\prod_{{n=1}}^{{{10**9}}} {term}" for term in ("n", "(x+n)"))))
    add("integral", *boxed("\\int e^{x^x} dx", "\\int_0^1 \\sin(x^x)^{x} dx", "\\int \\sqrt{\\tan x}^{\\pi} dx"))
    add("limit", *boxed("\\lim_{x \\to 0} x^{x^{x^x}}", "\\lim_{n \\to \\infty} \\frac{n!}{n^n}"))
    add("polynomial", *boxed(*(f"(x+1)^{{{10**k}}}" for k in (3, 5, 8)), "(a+b+c+d+e+f)^{60}", "(x+y)^{1000} - 1"))
    add("equation", *boxed("x^9 + x^8 - y^7 + xy = z^{31}", "\\sin x = x^{17} + e^x", "x^{10^6} = 1"))
    add("digits", *boxed("9" * 5000, "9" * 100_000, "0." + "3" * 100_000, "1" * 30_000 + "/" + "7" * 30_000))
    add("precision", *boxed("\\sin(10^{10^{7}})", "e^{10^{9}}", "10^{10^8} + 0.1", "0.1^{10^9}", "\\ln(10^{10^{10}})"))

    pairs = (("{", "}"), ("(", ")"), ("[", "]"), ("\\left(", "\\right)"), ("\\{", "\\}"), ("\\sqrt{", "}"))
    for opening, closing in (*pairs, ("\\frac{1}{", "}"), ("|", "|"), ("\\boxed{", "}"), ("\\text{", "}"), ("-", "")):
        nested = opening * DEPTH + "1" + closing * DEPTH
        add(f"nested {opening}", nested, *boxed(nested, closing * DEPTH), opening * DEPTH)
    add("nested plain", "(" * DEPTH + "1" + ")" * DEPTH, "1+(" * DEPTH + "1" + ")" * DEPTH)
    chains = ("+1", "^1", "=1", ",1", "\\cdot x", "\\times 2", "_1", "!", "'", "\\\\", "&", "<1", "\\cup \\{1\\}", " 1")
    add("chain", *boxed(*("1" + link * DEPTH for link in chains)), *("1" + link * DEPTH for link in ("+1", "^1", "*1")))

    for text in ("a", "1", "\n", "\\", "$", "{", "\\boxed{", "$1$ ", "1 ", "answer ", "final answer is ", "é", "数"):
        add(f"a megabyte of {text!r}", text * (MEGABYTE // len(text)))
    add("a megabyte before", "word " * (MEGABYTE // 5) + "\\boxed{7}", "1 " * (MEGABYTE // 2) + "\\boxed{7}")
    add("a megabyte inside", *boxed("x" * MEGABYTE, "1+" * (MEGABYTE // 2) + "1", "\\text{" + "a " * MEGABYTE + "}"))

    specials = ("\0", "\0" * 1000, "1\x002", "\ud800", "\udfff" * 100, "1\ud83d", "\x1b[2J", "\ufeff7", "\u202e7")
    add("special characters", *specials, *boxed(*specials), *(f"${text}$" for text in specials))
    formats = ("%s%s%s%n", "%999999999d", "{0}{1}", "{:>999999999}", "{x.__class__}", "${jndi:x}", "\\u0041", "%00")
    add("format strings", *formats, *boxed(*formats))
    code = ("__import__('os').system('exit')", "exit()", "raise SystemExit", "lambda: 0", "os.kill(0, 9)", "1; 2", "#7")
    add("code", *code, *boxed(*code), *(f"${text}$" for text in code))
    expressions = (
        "E**E**9",
        "factorial(10**9)",
        "Symbol('x')",
        "oo-oo",
        "zoo",
        "nan",
        "1/0",
        "0**0",
        "0/0",
        "1e99999999",
    )
    add("sympy", *expressions, *boxed(*expressions))
    undefined = ("\\frac{1}{0}", "\\frac{0}{0}", "\\infty - \\infty", "\\tan \\frac{\\pi}{2}", "0^{-1}", "\\ln 0")
    add("undefined", *boxed(*undefined), *(f"${value}$" for value in undefined))

    n = 20_000
    add("regular expressions", "$" + "a" * n, "$$" + "a" * n, "\\[" + "a" * n, "\\(" + "a" * n, " [" + "a" * n)
    add("more regular expressions", "$1$ and " * n, "$1$," * n, "1,000" * n, "-" * n + "1", "(1" * n, "1 " * n + "x")
    add("anchors", "answer" * n + "$", "answer: " * n, "final answer" + " is" * n, "final answer is $" * n, "=" * n)
    add("boxes", "\\boxed{1} and " * n, "\\boxed" * n, "\\boxed{}" * n, "\\boxed{{{" * n, "\\boxed{1" + "}" * n)
    add("LaTeX", *boxed("\\frac" * n, "\\sqrt" * n, "\\left" * n, "\\begin{pmatrix}" * n, "\\text" * n, "_" * n))
    add("matrices", *boxed(*("\\begin{pmatrix}" + "&".join(["1"] * k) + "\\end{pmatrix}" for k in (100, 10_000))))
    rows = "\\\\".join(["&".join(["x"] * 20)] * 20)
    add("determinants", *boxed(*(f"\\begin{{{kind}}}{rows}\\end{{{kind}}}" for kind in ("vmatrix", "Vmatrix"))))
    add("sets", *boxed("\\{" + ",".join(map(str, range(3000))) + "\\}", ",".join(["x"] * n), "(" + "1," * n + "1)"))
    columns = "\\begin{array}{" + "c" * n + "}1\\end{array}"
    add("environments", *boxed("\\begin{cases}" * 100, "\\begin{x}1\\end{y}", columns))
    commands = (
        "input{/etc/passwd} write18{ls} def\\x{\\x}\\x catcode`\\$=0 loop\\repeat csname expandafter special".split()
    )
    add("commands", *(f"$\\{command}$" for command in commands), *boxed(*(f"\\{command}" for command in commands)))
    return found
