"""The closed lists the demo corpus draws from: capitals, names, words to spell, and number words."""

CAPITALS: dict[str, str] = {
    "Argentina": "Buenos Aires", "Australia": "Canberra", "Austria": "Vienna", "Belgium": "Brussels",
    "Brazil": "Brasilia", "Bulgaria": "Sofia", "Canada": "Ottawa", "Chile": "Santiago", "China": "Beijing",
    "Colombia": "Bogota", "Croatia": "Zagreb", "Cuba": "Havana", "Denmark": "Copenhagen", "Ecuador": "Quito",
    "Egypt": "Cairo", "Estonia": "Tallinn", "Ethiopia": "Addis Ababa", "Finland": "Helsinki", "France": "Paris",
    "Germany": "Berlin", "Ghana": "Accra", "Greece": "Athens", "Hungary": "Budapest", "Iceland": "Reykjavik",
    "India": "New Delhi", "Indonesia": "Jakarta", "Iran": "Tehran", "Iraq": "Baghdad", "Ireland": "Dublin",
    "Italy": "Rome", "Japan": "Tokyo", "Kenya": "Nairobi", "Latvia": "Riga", "Mexico": "Mexico City",
    "Morocco": "Rabat", "Nepal": "Kathmandu", "Norway": "Oslo", "Peru": "Lima", "Poland": "Warsaw",
    "Portugal": "Lisbon", "Romania": "Bucharest", "Russia": "Moscow", "Serbia": "Belgrade",
    "South Korea": "Seoul", "Spain": "Madrid", "Sweden": "Stockholm", "Thailand": "Bangkok", "Turkey": "Ankara",
    "Ukraine": "Kyiv", "Vietnam": "Hanoi",
}  # fmt: skip

GIRLS: tuple[str, ...] = (
    "Ada", "Anna", "Bella", "Clara", "Daisy", "Elsa", "Emma", "Fiona", "Grace", "Hanna", "Ivy", "Julia",
    "Lily", "Lola", "Luna", "Maya", "Mia", "Nina", "Nora", "Olga", "Rosa", "Ruby", "Sara", "Zoe",
)  # fmt: skip
BOYS: tuple[str, ...] = (
    "Adam", "Ali", "Ben", "Bruno", "Carl", "Dan", "Eric", "Felix", "Finn", "Hugo", "Ivan", "Jack",
    "Leo", "Liam", "Lucas", "Max", "Noah", "Omar", "Oscar", "Otto", "Paul", "Sam", "Tom", "Victor",
)  # fmt: skip
NAMES: tuple[str, ...] = GIRLS + BOYS

GOODS: tuple[str, ...] = (
    "apples", "balls", "books", "boxes", "cakes", "candles", "caps", "chairs", "cups", "dolls", "eggs", "flowers",
    "hats", "keys", "kites", "lamps", "lemons", "maps", "pears", "pencils", "plates", "rings", "shirts", "spoons",
)  # fmt: skip

SPELLING_WORDS: tuple[str, ...] = tuple(
    """apple arm autumn baby bag ball banana basket bath beach bear bed bell bird black blue boat body book
    bottle bowl box bread bridge bright brother brown bucket butter button cake camera candle captain car carpet
    castle cat chair cheese cherry chicken child circle city clock cloud coat coffee cold color computer corn cow
    cup dance daughter day desk diamond dinner doctor dog dollar door dragon dream dress drum duck eagle ear earth
    elephant engine evening eye face family farm father feather finger fire fish flag flower forest fork friend
    frog fruit garden ghost giant giraffe girl glass gold goose grape grass green guitar hammer hand happy heart
    hill honey horse hospital hotel hour house ice island jacket jelly jewel jungle kettle key king kitchen kite
    kitten knife ladder lake lamp leaf lemon letter library light lion machine magic map market mask melon milk
    mirror money monkey moon morning mother mountain mouse music napkin needle nest night north nose number ocean
    onion orange owl paint palace panda paper parrot pencil penguin pepper piano picture pillow planet plate
    pocket potato present prince purple puzzle queen quick quiet rabbit rain rainbow ribbon ring river robot
    rocket roof rose sailor salt sand school scissors sea shadow sheep ship shirt shoe silver sister sky snow soup
    spider spoon spring square star station stone storm story street sugar summer sun sweater table teacher
    telephone tiger tomato tower train travel tree triangle tunnel turtle umbrella uncle valley village violin
    wagon water whale wheel whistle white window winter wizard wolf wonder yellow zebra""".split()
)

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def in_words(number: int) -> str:
    """The number in English words, for anything a sum or difference of numbers up to 99 can reach."""
    if number < 0:
        return f"minus {in_words(-number)}"
    if number < 20:
        return _ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")
    if number < 200:
        return "one hundred" + (f" {in_words(number - 100)}" if number > 100 else "")
    raise ValueError(f"no words for {number}")
