export { Curves } from "./Curves";
