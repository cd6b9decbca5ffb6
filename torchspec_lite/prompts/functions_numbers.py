"""Small functions on numbers and lists, written for the demo prompts: the tests run every example."""


def count_above(values: list, limit: int) -> int:
    """Count the values that are greater than the limit.
    >>> count_above([3, 8, 1, 9], 5)
    2
    >>> count_above([], 0)
    0
    """
    return sum(v > limit for v in values)


def alternate(first: list, second: list) -> list:
    """Take items from the two lists in turn. When one list is used up, append the rest of the other.
    >>> alternate([1, 2, 3], ["a"])
    [1, 'a', 2, 3]
    """
    out = []
    for i in range(max(len(first), len(second))):
        out += first[i:i + 1] + second[i:i + 1]
    return out


def digit_product(n: int) -> int:
    """Return the product of the decimal digits of a positive integer, leaving out zeros.
    >>> digit_product(2034)
    24
    >>> digit_product(7)
    7
    """
    p = 1
    for d in str(n):
        p *= int(d) or 1
    return p


def is_staircase(heights: list) -> bool:
    """Return True if every height is exactly one more than the height before it.
    >>> is_staircase([4, 5, 6])
    True
    >>> is_staircase([1, 3])
    False
    """
    return all(b - a == 1 for a, b in zip(heights, heights[1:]))


def split_bill(total_cents: int, people: int) -> list:
    """Split a bill as fairly as possible. The first people pay one cent more if it does not divide evenly.
    >>> split_bill(100, 3)
    [34, 33, 33]
    """
    q, r = divmod(total_cents, people)
    return [q + (i < r) for i in range(people)]


def clock_angle(hour: int, minute: int) -> float:
    """Return the smaller angle in degrees between the hands of a clock.
    >>> clock_angle(3, 0)
    90.0
    >>> clock_angle(12, 30)
    165.0
    """
    a = abs((hour % 12) * 30 + minute / 2 - minute * 6)
    return min(a, 360 - a)


def missing_number(numbers: list) -> int:
    """The list holds all numbers from 0 to n but one. Return the one that is missing.
    >>> missing_number([3, 0, 1])
    2
    """
    n = len(numbers)
    return n * (n + 1) // 2 - sum(numbers)


def is_abundant(n: int) -> bool:
    """Check whether the proper divisors of n add up to more than n.
    >>> is_abundant(12)
    True
    >>> is_abundant(15)
    False
    """
    return sum(d for d in range(1, n) if n % d == 0) > n


def rotate_left(items: list, steps: int) -> list:
    """Rotate the list to the left by the given number of steps.
    >>> rotate_left([1, 2, 3, 4], 1)
    [2, 3, 4, 1]
    >>> rotate_left([], 3)
    []
    """
    if not items:
        return []
    k = steps % len(items)
    return items[k:] + items[:k]


def flatten_once(nested: list) -> list:
    """Flatten a list by one level. Items which are not lists stay as they are.
    >>> flatten_once([1, [2, 3], [[4]]])
    [1, 2, 3, [4]]
    """
    out = []
    for x in nested:
        out += x if isinstance(x, list) else [x]
    return out


def remove_every(items: list, n: int) -> list:
    """Remove every n-th item of the list, counting from one.
    >>> remove_every([1, 2, 3, 4, 5, 6], 3)
    [1, 2, 4, 5]
    """
    return [x for i, x in enumerate(items, 1) if i % n]


def biggest_gap(numbers):
    """ Return the largest difference between two neighbours in the sorted list.
    >>> biggest_gap([10, 1, 4])
    6
    """
    s = sorted(numbers)
    return max(b - a for a, b in zip(s, s[1:]))


def pack_boxes(weights: list, capacity: int) -> int:
    """Put the weights in order into boxes of the given capacity, opening a new box whenever the next one does not fit.
    Return the number of boxes used.
    >>> pack_boxes([4, 3, 5, 2], 7)
    2
    """
    boxes, room = 0, 0
    for w in weights:
        if w > room:
            boxes, room = boxes + 1, capacity
        room -= w
    return boxes


def most_common_digit(n: int) -> int:
    """Return the digit that occurs most often in n. In a tie return the smallest one.
    >>> most_common_digit(72727)
    7
    >>> most_common_digit(1221)
    1
    """
    s = str(n)
    return max(range(10), key=lambda d: (s.count(str(d)), -d))


def diagonal_sum(matrix: list) -> int:
    """Add up the numbers on the main diagonal of a square matrix.
    >>> diagonal_sum([[1, 2], [3, 4]])
    5
    """
    return sum(r[i] for i, r in enumerate(matrix))


def steps_to_zero(n: int) -> int:
    """In each step halve n if it is even and subtract one if it is odd. Return the number of steps until n is zero.
    >>> steps_to_zero(14)
    6
    """
    s = 0
    while n:
        n = n - 1 if n % 2 else n // 2
        s += 1
    return s


def unique_in_order(items: list) -> list:
    """Remove repeated items and keep the first of each in its place.
    >>> unique_in_order([3, 1, 3, 2, 1])
    [3, 1, 2]
    """
    return list(dict.fromkeys(items))


def is_perfect_square(n: int) -> bool:
    """Return True if n is the square of an integer. Do not use floating point numbers.
    >>> is_perfect_square(49)
    True
    >>> is_perfect_square(50)
    False
    """
    from math import isqrt
    return n >= 0 and isqrt(n) ** 2 == n


def chunk(items: list, size: int) -> list:
    """Cut the list into pieces of the given size; the last piece may be shorter.
    >>> chunk([1, 2, 3, 4, 5], 2)
    [[1, 2], [3, 4], [5]]
    """
    return [items[i:i + size] for i in range(0, len(items), size)]


def days_above_average(temperatures: list) -> int:
    """Return on how many days it was warmer than the average of all days.
    >>> days_above_average([10, 20, 30])
    1
    """
    m = sum(temperatures) / len(temperatures)
    return sum(t > m for t in temperatures)


def fizz_numbers(n: int) -> list:
    """Return the numbers from 1 to n, but with 'fizz' in place of the multiples of 3.
    >>> fizz_numbers(4)
    [1, 2, 'fizz', 4]
    """
    return ["fizz" if i % 3 == 0 else i for i in range(1, n + 1)]


def water_level(changes: list, start: int, maximum: int) -> int:
    """Apply the changes to the water level one after the other. It never falls below 0 nor rises above the maximum.
    >>> water_level([5, -20, 3], 10, 12)
    3
    """
    for c in changes:
        start = min(maximum, max(0, start + c))
    return start


def prime_gaps(limit: int) -> list:
    """Return the differences between neighbouring primes up to the limit.
    >>> prime_gaps(12)
    [1, 2, 2, 4]
    """
    p = [n for n in range(2, limit + 1) if all(n % d for d in range(2, n))]
    return [b - a for a, b in zip(p, p[1:])]


def binary_ones(n: int) -> int:
    """Count the ones in the binary form of a non-negative integer.
    >>> binary_ones(13)
    3
    """
    return bin(n).count("1")


def merge_sorted(first: list, second: list) -> list:
    """Merge two sorted lists into one sorted list without calling sort.
    >>> merge_sorted([1, 4], [2, 3, 5])
    [1, 2, 3, 4, 5]
    """
    out, i, j = [], 0, 0
    while i < len(first) or j < len(second):
        if j == len(second) or i < len(first) and first[i] <= second[j]:
            out.append(first[i])
            i += 1
        else:
            out.append(second[j])
            j += 1
    return out


def leap_years(start: int, end: int) -> list:
    """Return all leap years from start to end, both included.
    >>> leap_years(1896, 1908)
    [1896, 1904, 1908]
    """
    return [y for y in range(start, end + 1) if y % 4 == 0 and (y % 100 or y % 400 == 0)]


def move_zeros(numbers: list) -> list:
    """Move all zeros to the end of the list without changing the order of the other numbers.
    >>> move_zeros([0, 1, 0, 3])
    [1, 3, 0, 0]
    """
    return [n for n in numbers if n] + [0] * numbers.count(0)


def pyramid(height: int) -> list:
    """Return the lines of a pyramid of stars, without spaces after the stars.
    >>> pyramid(3)
    ['  *', ' ***', '*****']
    """
    return [" " * (height - i - 1) + "*" * (2 * i + 1) for i in range(height)]


def balance_after(transactions: list) -> int:
    """Each transaction is a pair of a word, 'in' or 'out', and an amount. Return the final balance, starting from 0.
    >>> balance_after([("in", 50), ("out", 20)])
    30
    """
    return sum(a if k == "in" else -a for k, a in transactions)


def sum_digits_until_one(n: int) -> int:
    """Add up the digits of n again and again until a single digit is left.
    >>> sum_digits_until_one(987)
    6
    """
    while n > 9:
        n = sum(map(int, str(n)))
    return n


def transpose(table: list) -> list:
    """Swap the rows and the columns of a table.
    >>> transpose([[1, 2, 3], [4, 5, 6]])
    [[1, 4], [2, 5], [3, 6]]
    """
    return [list(r) for r in zip(*table)]


def longest_run(values: list) -> int:
    """Return the length of the longest run of equal values.
    >>> longest_run([1, 1, 2, 2, 2, 1])
    3
    >>> longest_run([])
    0
    """
    best = run = 0
    for i, value in enumerate(values):
        run = run + 1 if i and value == values[i - 1] else 1
        best = max(best, run)
    return best


def seats_left(rows: list) -> dict:
    """Each row is a string of '.' for a free seat and 'x' for a taken one.
    Map the number of every row that has free seats, counting from 1, to how many there are.
    >>> seats_left(["x.x", "xxx", ".."])
    {1: 1, 3: 2}
    """
    return {number: row.count(".") for number, row in enumerate(rows, 1) if "." in row}


def nearest_stop(stops: list, place: int):
    """Return the bus stop nearest to the place. If two are equally near, return the smaller one; without stops, None.
    >>> nearest_stop([2, 9, 14], 12)
    14
    >>> nearest_stop([4, 8], 6)
    4
    """
    return min(stops, key=lambda stop: (abs(stop - place), stop), default=None)


def days_until_empty(stock: int, sold_per_day: int, delivered_per_day: int) -> int:
    """Return after how many days the stock is used up, or -1 if it never is.
    >>> days_until_empty(10, 5, 2)
    4
    >>> days_until_empty(10, 2, 2)
    -1
    """
    loss = sold_per_day - delivered_per_day
    return -(-stock // loss) if loss > 0 else -1


def price_with_tax(price: float, percent: float) -> float:
    """Add a tax of so many percent to the price and round the result to two decimals.
    >>> price_with_tax(20, 8.5)
    21.7
    """
    return round(price * (1 + percent / 100), 2)
