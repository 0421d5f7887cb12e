// The connection to the supervisor: fetch the document, follow its changes, and start again if that fails.

const PATIENCE_MS = 15_000; // without a change or a beat
const AGAIN_MS = [250, 500, 1000, 2000, 3000];
const FULL_MS = 10_000;
const HIDDEN_MS = 60_000; // a hidden page disconnects after this time

export class Link {
  #source = null;
  #timer = 0;
  #silent = 0;
  #tries = 0;

  constructor(model, changed) {
    Object.assign(this, { model, changed, state: "opening", since: Date.now() / 1000 });
    document.addEventListener("visibilitychange", () => {
      clearTimeout(this.hidden);
      if (document.hidden) this.hidden = setTimeout(() => this.#close(), HIDDEN_MS);
      else if (!this.#source) this.open();
    });
    addEventListener("online", () => this.open());
  }

  async open() {
    this.#close();
    try {
      const response = await fetch("page/document", { cache: "no-store", signal: AbortSignal.timeout(PATIENCE_MS) });
      if (!response.ok) throw new Error(`the answer was ${response.status}`);
      const found = await response.json();
      this.model.replace(found);
      this.model.known = true;
      this.#follow(found.number);
    } catch {
      this.#lost();
    }
  }

  #follow(number) {
    this.#close();
    const source = new EventSource(`page/changes?after=${encodeURIComponent(number)}`);
    this.#source = source;
    const heard = () => {
      clearTimeout(this.#silent);
      this.#silent = setTimeout(() => this.#lost(), PATIENCE_MS);
      this.#tries = 0;
      this.#is("live");
    };
    source.onopen = heard;
    source.onmessage = (event) => {
      heard();
      this.model.merge(JSON.parse(event.data));
      this.changed();
    };
    source.addEventListener("beat", (event) => {
      heard();
      this.model.beat(Number(event.data));
    });
    source.addEventListener("anew", () => this.open());
    source.onerror = () => {
      if (source !== this.#source) return;
      if (source.readyState === EventSource.CLOSED && this.state !== "lost") this.#full(); // refused: too many viewers
      else this.#lost();
    };
    heard();
    this.changed();
  }

  async #full() {
    this.#close();
    this.#is("full");
    this.#timer = setTimeout(() => this.open(), FULL_MS);
  }

  #lost() {
    this.#close();
    this.#is("lost");
    this.#timer = setTimeout(() => this.open(), AGAIN_MS[Math.min(this.#tries++, AGAIN_MS.length - 1)]);
  }

  #close() {
    clearTimeout(this.#timer);
    clearTimeout(this.#silent);
    this.#source?.close();
    this.#source = null;
  }

  #is(state) {
    if (state === this.state) return;
    this.state = state;
    this.since = Date.now() / 1000;
    this.changed();
  }
}
