// Every page's script: the theme's switch, copy buttons, what htmx needs, and the live run page where there is one.

import "./css/main.css";
import "htmx.org";
import { confirmations, menus } from "./confirm";
import { copyButtons } from "./copyButtons";
import { presetHints } from "./presetHints";
import { themeSwitch } from "./theme";

themeSwitch(document);
copyButtons(document);
presetHints(document);
confirmations(document);
menus(document);

const page = document.querySelector<HTMLElement>("[data-live-run]");
if (page) void import("./runPage").then(({ runPage }) => runPage(page));
