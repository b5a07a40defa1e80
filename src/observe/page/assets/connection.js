// The session and the stream of events. It reconnects on its own, and is closed while the page is hidden.

const AGAIN = 1500;

export class Connection {
  /** `onPicture(picture)` for each event; `onLink(state, text)` when the connection changes. */
  constructor(onPicture, onLink) {
    Object.assign(this, { onPicture, onLink, source: null, timer: 0 });
    document.addEventListener('visibilitychange', () => (document.hidden ? this.close() : this.open()));
    window.addEventListener('hashchange', () => this.start());
  }

  /** Exchanges the key in the URL for the cookie, and removes it from the URL. */
  async start() {
    const key = new URLSearchParams(location.hash.slice(1)).get('key');
    if (key) {
      history.replaceState(null, '', location.pathname);
      this.close();
      await fetch('session', { method: 'POST', body: key }).catch(() => null);
    }
    await this.open();
  }

  async open() {
    clearTimeout(this.timer);
    if (this.source || document.hidden) return;
    const answer = await fetch('session').catch(() => null);
    if (this.source) return;
    if (!answer) return this.again('lost', 'disconnected, trying again');
    // The key of a program that was started again is another one: trying again would not help.
    if (answer.status === 403) return this.onLink('refused', 'no key: open the URL that the program has printed');
    const source = new EventSource('events');
    this.source = source;
    source.onopen = () => this.onLink('live', 'live');
    source.onmessage = (event) => this.onPicture(JSON.parse(event.data));
    source.onerror = async () => {
      const refused = source.readyState === EventSource.CLOSED;
      this.close();
      if (!refused) return this.again('lost', 'disconnected, trying again');
      this.again('refused', 'the page has as many viewers as it can have');
    };
  }

  close() {
    clearTimeout(this.timer);
    this.source?.close();
    this.source = null;
  }

  again(state, text) {
    this.onLink(state, text);
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), AGAIN);
  }
}
