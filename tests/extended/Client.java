import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.security.MessageDigest;
import java.util.HexFormat;

/** java.net.http with its defaults, by the clients' protocol (see tests/it/py/protocol.py). */
public class Client {
    static final HttpClient CLIENT = HttpClient.newHttpClient();

    static void say(HttpRequest request) throws Exception {
        HttpResponse<byte[]> answer = CLIENT.send(request, HttpResponse.BodyHandlers.ofByteArray());
        byte[] digest = MessageDigest.getInstance("SHA-256").digest(answer.body());
        String retry = answer.headers().firstValue("retry-after").orElse("-");
        System.out.println(answer.statusCode() + " " + retry + " " + HexFormat.of().formatHex(digest));
    }

    public static void main(String[] arguments) throws Exception {
        if (arguments[0].equals("get")) {
            for (int n = 1; n < arguments.length; n++) {
                say(HttpRequest.newBuilder(URI.create(arguments[n])).build());
            }
            return;
        }
        byte[] body = new byte[Integer.parseInt(arguments[2])];
        for (int n = 0; n < body.length; n++) {
            body[n] = (byte) (n % 251);
        }
        say(HttpRequest.newBuilder(URI.create(arguments[1])).POST(HttpRequest.BodyPublishers.ofByteArray(body)).build());
    }
}
