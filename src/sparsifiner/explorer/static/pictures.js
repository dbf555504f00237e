// The images: those that are offered, and the reader's own, which live as long as the page.

import * as api from "./api.js";
import { element, find } from "./words.js";

export class Pictures {
  // onChoose is told the id of an image, onProblem a message, onStatus what went well.
  constructor(about, { onChoose, onProblem, onStatus }) {
    Object.assign(this, { about, onChoose, onProblem, onStatus });
    this.images = about.images.map((image) => ({ ...image, own: false }));
    this.session = null;
    this.chosen = null;
    this.show();
    this.listen();
  }

  show() {
    const items = this.images.map((image) => {
      const input = element("input", { type: "radio", name: "image", value: image.id, checked: image.id === this.chosen });
      input.addEventListener("change", () => this.onChoose(image.id));
      const picture = element("img", { src: api.imageAddress(image.id, true), alt: "", loading: "lazy", width: 64, height: 64 });
      const name = image.own ? `${image.name} (yours)` : image.name;
      return element("label", { title: name, className: image.own ? "own" : "" }, input, picture, element("span", { className: "hidden", textContent: name }));
    });
    find("thumbnails").replaceChildren(...items);
  }

  choose(id) {
    this.chosen = id;
    for (const input of find("thumbnails").querySelectorAll("input")) input.checked = input.value === id;
    const image = this.images.find((found) => found.id === id);
    const credit = find("credit");
    credit.replaceChildren(image?.name ?? "");
    if (image?.credit) {
      const words = image.link
        ? element("a", { href: image.link, rel: "noreferrer", target: "_blank", textContent: image.credit })
        : image.credit;
      credit.append(": ", words);
    }
    if (image?.own) credit.append(": yours, not part of the link", image.notes?.length ? `. ${image.notes.join(" ")}` : "");
  }

  listen() {
    find("file").addEventListener("change", (event) => {
      this.take(event.target.files[0]);
      event.target.value = "";
    });
    let depth = 0; // drags enter and leave every element on their way
    const over = (change) => {
      depth = Math.max(0, depth + change);
      document.body.classList.toggle("dragging", depth > 0);
    };
    window.addEventListener("dragenter", () => over(1));
    window.addEventListener("dragleave", () => over(-1));
    window.addEventListener("dragover", (event) => event.preventDefault());
    window.addEventListener("drop", (event) => {
      event.preventDefault();
      over(-depth);
      if (event.dataTransfer.files.length) this.take(event.dataTransfer.files[0]);
      else this.onProblem("Drop an image file: pictures of other pages cannot be taken from there.");
    });
    window.addEventListener("paste", (event) => {
      if (event.clipboardData?.files.length) this.take(event.clipboardData.files[0]);
    });
    window.addEventListener("pagehide", () => {
      if (this.session) api.closeSession(this.session);
    });
    window.addEventListener("pageshow", (event) => {
      if (event.persisted && this.session) window.location.reload(); // its images went when it was hidden
    });
  }

  async take(file) {
    if (!file) return;
    const { bytes, images } = this.about.limits;
    if (file.size > bytes) {
      this.onProblem(`${file.name} is larger than ${Math.round(bytes / 2 ** 20)} MiB: make it smaller first.`);
      return;
    }
    this.onStatus(`Reading ${file.name}.`);
    try {
      if (!this.session) await this.open();
      const answer = await api.send(this.session, file);
      this.images.unshift({ ...answer, own: true });
      const own = this.images.filter((image) => image.own);
      if (own.length > images) this.images.splice(this.images.indexOf(own.at(-1)), 1); // the server drops the oldest too
      this.show();
      this.onStatus(`${answer.name} is shown. ${answer.notes.join(" ")}`);
      this.onChoose(answer.id);
    } catch (problem) {
      if (problem.status === 404) this.lose();
      this.onProblem(`${file.name || "The image"}: ${problem.message}`);
    }
  }

  async open() {
    this.session = (await api.openSession()).session;
    this.beat = setInterval(async () => {
      try {
        await api.stillOpen(this.session);
      } catch (problem) {
        if (problem.status === 404) this.lose(problem.message);
      }
    }, 1000 * this.about.limits.heartbeat);
  }

  // The server has let go of this page's images.
  lose(message) {
    clearInterval(this.beat);
    this.session = null;
    const had = this.images.some((image) => image.own && image.id === this.chosen);
    this.images = this.images.filter((image) => !image.own);
    this.show();
    if (had) this.onChoose(this.images[0].id);
    if (message) this.onProblem(message);
  }
}
