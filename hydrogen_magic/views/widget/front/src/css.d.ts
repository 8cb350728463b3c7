/** Style sheets are bundled as text (`--loader:.css=text`) and put beside what they style. */
declare module "*.css" {
  const text: string;
  export default text;
}
