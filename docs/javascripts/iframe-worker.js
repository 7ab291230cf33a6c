// The theme searches in a web worker, which browsers refuse to pages that are opened from disk.
// For these pages, run the worker's script in a hidden frame instead. Nothing is loaded from outside.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow;
      const load = (url) =>
        new Promise((resolve, reject) => {
          const script = frame.contentDocument.createElement("script");
          script.onload = resolve;
          script.onerror = reject;
          script.src = url;
          frame.contentDocument.head.append(script);
        });
      inside.importScripts = (...urls) => urls.reduce((before, url) => before.then(() => load(url)), Promise.resolve());
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inside = inside;
      this.frame = frame;
      this.ready = load(new URL(address, location.href).href);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
