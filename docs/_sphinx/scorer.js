// What Sphinx adds to a page's score, and the words of its title: it counts those of any heading, and how often a word
// occurs not at all, so a long page with all words would come before the page that is about them.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  inTitle: 20,
  background: -3,
  backgroundPages: /^(CHANGELOG|CONTRIBUTING|ARCHITECTURE|docs\/(field|reference\/api|README))$/,
  stems: (text) => {
    const stemmer = new Stemmer();
    const words = splitQuery(text.toLowerCase()).filter((word) => !stopwords.has(word));
    return words.map((word) => stemmer.stemWord(word));
  },
  score: ([page, title, , , score]) => {
    const asked = Scorer.stems(new URLSearchParams(window.location.search).get("q") ?? "");
    const named = new Set(Scorer.stems(title));
    const share = asked.filter((word) => named.has(word)).length / (asked.length || 1);
    return score + Scorer.inTitle * share + (Scorer.backgroundPages.test(page) ? Scorer.background : 0);
  },
};
